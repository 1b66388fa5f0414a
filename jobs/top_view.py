"""How `longhaul top` looks: pure functions from a snapshot and the size of the terminal to what is drawn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich import console, table, text

from jobs import columns, hints, progress, values
from jobs.columns import Bar, Column
from jobs.top_data import Row, Snapshot

Section = Literal["jobs", "queue", "workers"]
SECTIONS: tuple[Section, ...] = ("jobs", "queue", "workers")
HELP = ("q quit", "j k scroll")
_STYLES = {
    "in_progress": "cyan",
    "validating": "cyan",
    "finalizing": "cyan",
    "completed": "green",
    "failed": "red",
    "expired": "red",
    "cancelled": "yellow",
    "cancelling": "yellow",
    "serving": "green",
    "loading": "cyan",
    "retiring": "yellow",
    "draining": "yellow",
}
_WIDE = 120
_LOW = 10


@dataclass(frozen=True)
class View:
    """Where the reader is: which list moves, which jobs are above the first, and how far others are moved."""

    focus: Section = "jobs"
    above: tuple[str, ...] = ()
    moved: Mapping[Section, int] = field(default_factory=dict)

    @property
    def after(self) -> str | None:
        """The job behind which the page begins."""
        return self.above[-1] if self.above else None


@dataclass(frozen=True)
class Heights:
    """How many jobs, models and workers there is room for."""

    jobs: int
    queue: int
    workers: int


def heights(snapshot: Snapshot, size: tuple[int, int]) -> Heights:
    """Divide a terminal (columns, lines): workers and queue get what they need up to a share, jobs the rest.

    A low one has no gaps between the lists.
    """
    width, lines = size
    room = max(3, lines - 5 - 2 * _gap(lines))  # a head, three titles, a foot
    workers = min(max(1, len(snapshot.workers or ())), max(1, room // 3))
    queue = min(max(1, len(snapshot.queue["models"])), max(1, room // 4))
    each = 2 if width < columns.NARROW else 1
    return Heights(max(1, (room - workers - queue) // each), queue, workers)


def scrolled(view: View, by: int, snapshot: Snapshot, size: tuple[int, int]) -> View:
    """Move the list in focus by so many lines; there is no moving past its end."""
    room = heights(snapshot, size)
    if view.focus == "jobs":
        if by < 0:
            return replace(view, above=view.above[:by])
        rows = page(snapshot, view)
        passed = rows[: max(0, min(by, len(rows) - (1 if snapshot.more else room.jobs)))]
        return replace(view, above=(*view.above, *(row.id for row in passed)))
    count = len(snapshot.queue["models"] if view.focus == "queue" else snapshot.workers or ())
    last = max(0, count - getattr(room, view.focus))
    place = max(0, min(view.moved.get(view.focus, 0) + by, last))
    return replace(view, moved={**view.moved, view.focus: place})


def page(snapshot: Snapshot, view: View) -> list[Row]:
    """Return the jobs from where the reader is on, as far as this snapshot has them; it may be of before."""
    if snapshot.after == view.after:
        return snapshot.jobs
    names = [row.id for row in snapshot.jobs]
    return snapshot.jobs[names.index(view.after) + 1 :] if view.after in names else []


def focused(view: View) -> View:
    """Let the next list be the one that moves."""
    return replace(view, focus=SECTIONS[(SECTIONS.index(view.focus) + 1) % len(SECTIONS)])


def screen(snapshot: Snapshot, view: View, url: str, problem: str | None, size: tuple[int, int]) -> Any:
    """Return all that is drawn on a terminal of `size` (columns, lines)."""
    width, lines = size
    room = heights(snapshot, size)
    rows = page(snapshot, view) or snapshot.jobs  # those of before, until the server has answered
    jobs = jobs_table(rows[: room.jobs], width)
    queue = queue_table(_part(snapshot.queue["models"], view.moved.get("queue", 0), room.queue), width)
    workers = workers_table(
        None
        if snapshot.workers is None
        else _part(snapshot.workers, view.moved.get("workers", 0), room.workers),
        width,
    )
    gap = [""] * _gap(lines)
    blocks = [head(snapshot, view, url, width), jobs, *gap, queue, *gap, workers]
    lists = (table.Table, columns.Headed)
    taken = sum(block.row_count + 1 if isinstance(block, lists) else 1 for block in blocks)
    blocks += [*[""] * (lines - taken - 1), foot(view, problem or standing(rows), width)]
    return console.Group(*(_one_line(block) if isinstance(block, text.Text) else block for block in blocks))


def head(snapshot: Snapshot, view: View, url: str, width: int) -> text.Text:
    """Return the first line: how much of everything, and where; what does not fit is left out whole."""
    models, workers = snapshot.queue["models"], snapshot.workers or ()
    queued, leased = (sum(model[name] for model in models) for name in ("queued", "leased"))
    rate = sum(worker["output_tokens_per_second"] for worker in workers)
    counts = [f"{queued:,} queued", f"{leased:,} leased", values.counted(len(workers), "worker")]
    counts.append(f"{rate:,.0f} tokens/s")
    if snapshot.queue["control"]:
        steps = snapshot.queue["control"]
        waits = "waits" if steps == 1 else "wait"
        counts.append(f"{values.counted(steps, 'step')} of jobs {waits} (checking, feeding, writing)")
    told = [columns.facts(counts, width, ", ")]
    told += [f"jobs from {len(view.above) + 1:,}"] * bool(view.above)
    line = columns.facts([*told, values.printable(url)], width, "   ")
    title = "longhaul top   "
    return text.Text.assemble((title if len(title) + len(line) <= width else "", "bold"), line)


def standing(rows: Sequence[Row]) -> str | None:
    """Return which of the jobs does not move, and why: the first of them."""
    return next((f"{row.id}: {row.standstill}" for row in rows if row.standstill), None)


def foot(view: View, problem: str | None, width: int) -> text.Text:
    """Return the last line: what is wrong, or stands still, else the keys."""
    if problem:
        return text.Text(values.printable(problem), style="bold red")
    return text.Text(columns.facts([*HELP, f"Tab next list (now {view.focus})"], width, "   "), style="dim")


def jobs_table(rows: Sequence[Row], width: int) -> Any:
    """Return the jobs; a narrow terminal shows less of each, and its id on a line of its own."""
    if not rows:
        return text.Text("No jobs. Make one: longhaul submit prompts.jsonl", style="dim")
    left = ["" if row.seconds_left is None else progress.span(row.seconds_left) for row in rows]
    failed = [_failed(row) for row in rows]
    names = [values.printable(row.id) for row in rows]
    facts = [
        Column("state", [_state(row.status) for row in rows], rank=1, whole=True),
        Column("", [Bar(row.done, row.total, 20 if width >= _WIDE else 10) for row in rows], rank=9),
        Column("done", [_done(row) for row in rows], number=True),
        Column("failed", failed, rank=4, number=True),
        Column("requests/s", [_rate(row.requests_per_second) for row in rows], rank=7, number=True),
        Column("tokens/s", [_rate(row.output_tokens_per_second) for row in rows], rank=6, number=True),
        Column("left", left, rank=2, number=True),
        Column("model", [values.printable(row.model or "") for row in rows], rank=8),
    ]
    if width < columns.NARROW:
        return columns.headed(names, facts, width)
    return columns.fitted([Column("job", names, whole=True), *facts], width)


def queue_table(models: Sequence[dict[str, Any]], width: int) -> Any:
    """Return what is queued and leased, by model and by bucket: the longest prompt it takes, in tokens."""
    if not models:
        return text.Text("No models are served: set LONGHAUL_MODELS.", style="dim")
    counts = [
        Column("model", [values.printable(model["model"]) for model in models]),
        Column("queued", [f"{model['queued']:,}" for model in models], number=True),
        Column("leased", [f"{model['leased']:,}" for model in models], rank=1, number=True),
    ]
    room = width - columns.narrowest(counts, width) - 2
    buckets = [_buckets(model["buckets"], room) for model in models]
    title = "queued, by length of prompt"
    by_length = Column(title if len(title) <= room else "by length", buckets, rank=2, whole=True)
    return columns.fitted([*counts, by_length], width)


def workers_table(workers: Sequence[dict[str, Any]] | None, width: int) -> Any:
    """Return the workers: their batch, rates, prefix hits and use of room for KV."""
    if workers is None:
        return text.Text("This server does not tell of its workers: it is older.", style="dim")
    if not workers:
        return text.Text(f"No workers: nothing runs. Start one: {hints.worker()}", style="dim")

    def numbers(title: str, shown: Callable[[Any], str], name: str, rank: int) -> Column:
        return Column(title, [shown(one[name]) for one in workers], rank=rank, number=True)

    batches = [f"{one['running']}/{one['capacity']}" for one in workers]
    return columns.fitted(
        [
            Column("worker", [values.printable(one["id"]) for one in workers]),
            Column("model", [values.printable(one["model"] or "(plans)") for one in workers], rank=5),
            Column("state", [_state(one["state"]) for one in workers], rank=4, whole=True),
            Column("batch", batches, number=True),
            numbers("prompt tokens/s", _rate, "prompt_tokens_per_second", 9),
            numbers("tokens/s", _rate, "output_tokens_per_second", 1),
            numbers("shared", _percent, "prefix_hit_ratio", 7),
            numbers("KV", _percent, "kv_usage_ratio", 6),
        ],
        width,
    )


def _gap(lines: int) -> int:
    return 1 if lines > _LOW else 0


def _done(row: Row) -> str:
    return f"{row.done:,}/{row.total:,}" if row.total else "-"


def _failed(row: Row) -> text.Text:
    # Of a job whose input was refused no request was counted: 0 would read as if none were wrong.
    return text.Text(f"{row.failed:,}" if row.total else "-", style="red" if row.failed else "")


def _state(name: str) -> text.Text:
    return text.Text(values.printable(name), style=_STYLES.get(name, ""))


def _buckets(counts: Mapping[str, int], room: int) -> str:
    parts = [f"≤{bound} {count:,}" for bound, count in counts.items()]
    whole = columns.facts(parts, room, "  ")
    return whole if whole == "  ".join(parts) else columns.facts(parts, room - 3, "  ") + "  …"


def _rate(value: float) -> str:
    return values.rate(value) if value else ""


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _part(rows: Sequence[dict[str, Any]], first: int, count: int) -> Sequence[dict[str, Any]]:
    return rows[min(first, max(0, len(rows) - count)) :][:count]


def _one_line(line: text.Text) -> text.Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
