"""The plots of a report: what each says in words and in numbers, and how it is drawn."""

from collections.abc import Iterator
from dataclasses import dataclass

from jobs import values
from jobs.profile import faults, gather, spread
from jobs.report import draw, sharing, words
from jobs.report.sources import Subject


@dataclass(frozen=True)
class Chart:
    """One plot. `note` says how to read it, `says` what it shows; `table` has its numbers."""

    name: str
    section: str
    title: str
    note: str
    says: str
    table: words.Table
    drawing: draw.Draw
    height: float = draw.HEIGHT


LATENCIES = {
    "e2e_seconds": ("End to end", "From the job's creation to a request's last token, waiting included."),
    "queue_seconds": ("Waiting in the queue", "From the job's creation until a worker began with a request."),
    "ttft_seconds": ("Time to first token", "From when a worker began with a request: without the queue."),
    "inter_token_seconds": ("Inter-token latency", "The mean gap between two tokens of a request."),
}
LENGTHS = {
    "prompt_tokens": ("Prompts", "Tokens of each prompt, shared ones included."),
    "completion_tokens": ("Answers", "Tokens generated for each request."),
}
LATENCY, LENGTH, ERRORS = "Latency", "Lengths", "Errors"
_TOKENS = words.Unit(1.0, "tokens", "tokens")


def charts(subject: Subject) -> list[Chart]:
    """Return the plots there is something to show in."""
    figures = subject.figures
    found = [*_latencies(figures), *_over_time(figures), *_lengths(figures)]
    found += _prefixes(sharing.Sharing.of(subject.summary, figures))
    return found + _errors(figures.errors.kinds)


def missing(figures: gather.Figures) -> dict[str, list[str]]:
    """Return by section which plots are not there, and why."""
    found: dict[str, list[str]] = {}
    for section, titles in ((LATENCY, LATENCIES), (LENGTH, LENGTHS)):
        found[section] = [
            f"{title}: not shown, as {figures.missing[name]}"
            for name, (title, _) in titles.items()
            if name in figures.missing
        ]
    return found


def _latencies(figures: gather.Figures) -> Iterator[Chart]:
    for name, (title, note) in LATENCIES.items():
        if (found := figures.latency[name]) is not None:
            yield _histogram(name, LATENCY, title, note, found, words.unit_of(found.p99))


def _lengths(figures: gather.Figures) -> Iterator[Chart]:
    for name, (title, note) in LENGTHS.items():
        if (found := figures.lengths[name]) is not None:
            yield _histogram(name, LENGTH, title, note, found, _TOKENS)


def _histogram(
    name: str, section: str, title: str, note: str, found: spread.Spread, unit: words.Unit
) -> Chart:
    edges = [edge * unit.factor for edge in found.edges]
    marks = {name: value * unit.factor for name, value in found.percentiles.items()}
    shown = [f"{name} {words.number(value)}" for name, value in marks.items()]
    says = f"{', '.join(shown)}; mean {words.number(found.mean * unit.factor)}, "
    says += f"from {words.number(found.least * unit.factor)} to {words.number(found.most * unit.factor)}"
    if found.beyond:
        beyond = values.counted(found.beyond, "request")
        note += f" {beyond} of {words.number(edges[-1])} {unit.short} or more not drawn."
    spans = words.lengths(found.edges) if section == LENGTH else words.times(edges, found.least * unit.factor)
    rows = [(span, f"{count:,}") for span, count in zip(spans, found.counts, strict=True)]
    if found.beyond:
        rows.append((f"{words.number(edges[-1])} or more", f"{found.beyond:,}"))
    table = words.Table((unit.name, "requests"), rows)
    if section == LENGTH and edges[1] - edges[0] == 1:
        edges = [edge - 0.5 for edge in edges]  # the bar of one whole number has it in its middle
    steps = draw.Steps(edges, found.counts, marks, unit.name, log=section == LATENCY)
    return Chart(name, section, title, note, f"{says}\N{NO-BREAK SPACE}{unit.short}.", table, steps)


def _over_time(figures: gather.Figures) -> Iterator[Chart]:
    if (found := figures.timeline) is None:
        return
    unit = words.unit_of(len(found.running) * found.bin_seconds)
    width, label = found.bin_seconds * unit.factor, f"{unit.name} since the first request began"
    each = words.unit_of(found.bin_seconds)
    slot = f"{found.bin_seconds * each.factor:g} {each.short}"
    amounts = {"generated": found.output_tokens, "read": found.read_tokens}
    rates = {name: found.per_second(tokens) for name, tokens in amounts.items() if any(tokens)}
    if rates:
        peaks = [f"{name}: up to {words.number(max(each))}" for name, each in rates.items()]
        note = (
            f"All workers; means over {slot}. Read: prompt tokens that were not cached. "
            "A request's tokens are spread evenly over the time in which it read or made them."
        )
        if why := figures.missing.get("completion_tokens"):
            note += f" Generated: not shown, as {why}"
        yield Chart(
            "tokens_over_time", "Over time", "Tokens per second", note, f"{'; '.join(peaks)} tokens/s.",
            _slots(unit, width, rates), draw.Lines(width, rates, label, "tokens/s"),
        )  # fmt: skip
    running = {"requests running": found.running}
    says = f"{words.number(found.mean_running)} on average, up to {words.number(max(found.running))}."
    note = f"Requests that workers have in their running batches, all together. Means over {slot}."
    lines = draw.Lines(width, running, label, "requests")
    yield Chart("batch_over_time", "Over time", "Batch size", note, says, _slots(unit, width, running), lines)


def _slots(unit: words.Unit, width: float, rows: dict[str, list[float]]) -> words.Table:
    columns = zip(*rows.values(), strict=True)
    lines = [(words.number(place * width), *map(words.number, each)) for place, each in enumerate(columns)]
    return words.Table((f"from ({unit.short})", *rows), lines)


def _prefixes(found: sharing.Sharing | None) -> Iterator[Chart]:
    if found is None:
        return
    bars = found.bars()
    yield Chart(
        "prefix_levels",
        "Shared prefixes",
        "Prompt tokens that are shared",
        "A run is a stretch of tokens that two requests or more have in common from the start on; level 2 "
        "is what some of these have in common beyond level 1. The plan looks at one bucket at a time. The "
        "engine also shares between buckets, and cannot share what it had to forget.",
        found.says,
        found.table(),
        bars,
        bars.height,
    )
    if found.blocks:
        note = "A block is a run of tokens: as wide as the requests that share it, as tall as it is long."
        yield Chart(
            "prefix_tree",
            "Shared prefixes",
            "The prefix tree",
            note,
            found.tree_says,
            found.tree_table(),
            found.tree(),
        )


def _errors(found: dict[str, faults.Kind]) -> list[Chart]:
    if not found:
        return []
    total = sum(kind.count for kind in found.values())
    labels = [f"{code[:60]}: {kind.count:,}" for code, kind in found.items()]
    counts = [float(kind.count) for kind in found.values()]
    bars = draw.Bars(labels, counts, max(counts))
    rows = [(code, f"{kind.count:,}", kind.message, ", ".join(kind.examples)) for code, kind in found.items()]
    table = words.Table(("kind", "errors", "first message", "custom_ids of the first"), rows)
    says = f"{values.counted(total, 'error')} of {values.counted(len(found), 'kind')}."
    note = "By code and, in brackets, the parameter at fault."
    return [Chart("errors", ERRORS, "Errors by kind", note, says, table, bars, bars.height)]
