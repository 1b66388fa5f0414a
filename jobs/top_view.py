"""How `longhaul top` looks: pure functions from a snapshot and the size of the terminal to what is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rich import console, progress_bar, table, text

from jobs import progress
from jobs.top_data import Row, Snapshot

Section = Literal["jobs", "queue", "workers"]
SECTIONS: tuple[Section, ...] = ("jobs", "queue", "workers")
HELP = "q quit   j k scroll   Tab next list"
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
_WIDE, _MIDDLE = 120, 90
_ID_LETTERS = 16
"""Enough of a job's id to tell it from others: what follows is random."""


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
    """How many lines of each list there is room for."""

    jobs: int
    queue: int
    workers: int


def heights(snapshot: Snapshot, lines: int) -> Heights:
    """Divide the lines of a terminal: workers and queue get what they need up to a share, jobs the rest."""
    room = max(3, lines - 7)  # a head, three titles, two gaps, a foot
    workers = min(max(1, len(snapshot.workers or ())), max(1, room // 3))
    queue = min(max(1, len(snapshot.queue["models"])), max(1, room // 4))
    return Heights(max(1, room - workers - queue), queue, workers)


def scrolled(view: View, by: int, snapshot: Snapshot, lines: int) -> View:
    """Move the list in focus by so many lines; there is no moving past its end."""
    room = heights(snapshot, lines)
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
    room = heights(snapshot, lines)
    rows = page(snapshot, view) or snapshot.jobs  # those of before, until the server has answered
    jobs = jobs_table(rows[: room.jobs], width)
    queue = queue_table(_part(snapshot.queue["models"], view.moved.get("queue", 0), room.queue))
    workers = workers_table(
        None
        if snapshot.workers is None
        else _part(snapshot.workers, view.moved.get("workers", 0), room.workers),
        width,
    )
    blocks = [head(snapshot, view, url), jobs, "", queue, "", workers]
    taken = sum(block.row_count + 1 if isinstance(block, table.Table) else 1 for block in blocks)
    blocks += [*[""] * (lines - taken - 1), foot(view, problem or standing(rows))]
    return console.Group(*(_one_line(block) if isinstance(block, text.Text) else block for block in blocks))


def head(snapshot: Snapshot, view: View, url: str) -> text.Text:
    """Return the first line: where, and how much of everything."""
    models, workers = snapshot.queue["models"], snapshot.workers or ()
    queued, leased = (sum(model[name] for model in models) for name in ("queued", "leased"))
    rate = sum(worker["output_tokens_per_second"] for worker in workers)
    facts = f"{queued:,} queued, {leased:,} leased"
    if snapshot.queue["control"]:
        facts += f", {snapshot.queue['control']:,} steps of jobs"
    facts += f"; {len(workers):,} workers, {rate:,.0f} tokens/s"
    place = f"   jobs from {len(view.above) + 1:,}" if view.above else ""
    return text.Text.assemble(("longhaul top   ", "bold"), facts, place, "   ", printable(url))


def standing(rows: Sequence[Row]) -> str | None:
    """Return which of the jobs does not move, and why: the first of them."""
    return next((f"{row.id}: {row.standstill}" for row in rows if row.standstill), None)


def foot(view: View, problem: str | None) -> text.Text:
    """Return the last line: what is wrong, or stands still, else the keys."""
    if problem:
        return text.Text(printable(problem), style="bold red")
    return text.Text(f"{HELP} (now {view.focus})", style="dim")


def jobs_table(rows: Sequence[Row], width: int) -> Any:
    """Return the jobs; a narrow terminal shows less of each."""
    if not rows:
        return text.Text("No jobs. Make one: longhaul submit prompts.jsonl", style="dim")
    wide, middle = width >= _WIDE, width >= _MIDDLE
    titles = ["job", "state", "", ">done", *([">failed"] if width >= 60 else [])]
    titles += [">requests/s", ">tokens/s"] if middle else []
    made = _table(*titles, ">left", *(["model"] if wide else []))
    for row in rows:
        name = row.id if wide else row.id[:_ID_LETTERS]
        cells: list[Any] = [name, _state(row.status), _bar(row, 20 if wide else 10), _count(row)]
        if width >= 60:
            cells.append(text.Text(f"{row.failed:,}", style="red" if row.failed else ""))
        if middle:
            cells += [_rate(row.requests_per_second), _rate(row.output_tokens_per_second)]
        cells.append("" if row.seconds_left is None else progress.span(row.seconds_left))
        made.add_row(*(_cell(one) for one in [*cells, *([row.model or ""] if wide else [])]))
    return made


def queue_table(models: Sequence[dict[str, Any]]) -> Any:
    """Return what is queued and leased, by model and by bucket: the longest prompt it takes, in tokens."""
    if not models:
        return text.Text("No models are served: set LONGHAUL_MODELS.", style="dim")
    made = _table("model", ">queued", ">leased", "queued, by length of prompt")
    for model in models:
        buckets = "  ".join(f"≤{bound} {count:,}" for bound, count in model["buckets"].items())
        facts = (model["model"], f"{model['queued']:,}", f"{model['leased']:,}", buckets)
        made.add_row(*map(_cell, facts))
    return made


def workers_table(workers: Sequence[dict[str, Any]] | None, width: int) -> Any:
    """Return the workers: their batch, rates, prefix hits and use of room for KV."""
    if workers is None:
        return text.Text("This server does not tell of its workers: it is older.", style="dim")
    if not workers:
        return text.Text("No workers: nothing runs. 'longhaul up' starts one.", style="dim")
    middle = width >= _MIDDLE
    prompt = [">prompt tokens/s"] if middle else []
    made = _table("worker", "model", "state", ">batch", *prompt, ">tokens/s", ">shared", ">KV")
    for one in workers:
        cells = [one["id"], one["model"] or "(plans)", _state(one["state"])]
        cells += [f"{one['running']}/{one['capacity']}"]
        cells += [_rate(one["prompt_tokens_per_second"])] if middle else []
        cells += [_rate(one["output_tokens_per_second"])]
        cells += [_percent(one["prefix_hit_ratio"]), _percent(one["kv_usage_ratio"])]
        made.add_row(*map(_cell, cells))
    return made


def printable(words: str) -> str:
    """Return a text in which nothing can move the cursor or colour the screen."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def _table(*titles: str) -> table.Table:
    made = table.Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for title in titles:
        justify: Literal["left", "right"] = "right" if title.startswith(">") else "left"
        made.add_column(title.removeprefix(">"), justify=justify, no_wrap=True, overflow="ellipsis")
    return made


def _cell(value: Any) -> Any:
    return text.Text(printable(value)) if isinstance(value, str) else value


def _state(name: str) -> text.Text:
    return text.Text(printable(name), style=_STYLES.get(name, ""))


def _bar(row: Row, width: int) -> progress_bar.ProgressBar:
    total = row.total or 1
    return progress_bar.ProgressBar(total=total, completed=row.done, width=width)


def _count(row: Row) -> str:
    return f"{row.done:,}/{row.total:,}"


def _rate(value: float) -> str:
    return "" if not value else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _part(rows: Sequence[dict[str, Any]], first: int, count: int) -> Sequence[dict[str, Any]]:
    return rows[min(first, max(0, len(rows) - count)) :][:count]


def _one_line(line: text.Text) -> text.Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
