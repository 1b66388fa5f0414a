"""Figures of the simulator as tables for people, as docs/scaling.md has them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def compared(rows: Sequence[Row]) -> str:
    """Return worker-hours (deadlines missed in brackets) and mean seconds of jobs, by pattern and rule."""
    hours = _by_rule(rows, "bound", "bound_hours", _hours)
    seconds = _by_rule(rows, "all there", "bound_seconds", lambda row: f"{row['mean_seconds']:,.0f}")
    return f"Worker-hours (deadlines missed)\n{hours}\n\nMean seconds from arrival to end\n{seconds}"


def of(rows: Sequence[Row], *names: str) -> str:
    """Return these columns of rows."""
    return table(
        [[name.replace("_", " ") for name in names], *([_cell(row[n]) for n in names] for row in rows)]
    )


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows, the first of which names the columns, as lines of aligned text."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *rest = widths
    return "\n".join(
        "  ".join(
            [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], rest, strict=True))]
        )
        for row in rows
    )


def _by_rule(rows: Sequence[Row], bound_name: str, bound: str, cell: Callable[[Row], str]) -> str:
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    found = {(row["pattern"], row["rule"]): row for row in rows}
    lines = [["pattern", "jobs", bound_name, *rules]]
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        one = found[pattern, rules[0]]
        cells = [cell(found[pattern, rule]) for rule in rules]
        lines.append([pattern, f"{one['jobs']:,.0f}", _cell(one[bound]), *cells])
    return table(lines)


def _hours(row: Row) -> str:
    missed = row["deadline_misses"]
    return _cell(row["worker_hours"]) + (f" ({missed:g})" if missed else "")


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"
