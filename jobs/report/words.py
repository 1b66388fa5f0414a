"""Numbers as people read them, and tables of them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Table:
    """The numbers behind a plot, as text; the first column names the row."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class Unit(NamedTuple):
    """What seconds are multiplied with to be shown, and the name of that."""

    factor: float
    name: str
    short: str


_UNITS = (
    (0.5, Unit(1e3, "milliseconds", "ms")),
    (600.0, Unit(1.0, "seconds", "s")),
    (10_800.0, Unit(1 / 60, "minutes", "min")),
)
_HOURS = Unit(1 / 3600, "hours", "h")


def unit_of(seconds: float) -> Unit:
    """Return the unit in which times up to `seconds` are shown."""
    return next((unit for most, unit in _UNITS if seconds < most), _HOURS)


def number(value: float) -> str:
    """Return a number with three digits or so, thousands set apart."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def seconds(value: float | None) -> str:
    """Return a time with its unit, a dash for one that is not known."""
    if value is None:
        return "-"
    unit = unit_of(value)
    return f"{number(value * unit.factor)} {unit.short}"


def share(part: float, whole: float) -> str:
    """Return how much of the whole a part is."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def times(edges: Sequence[float], least: float) -> list[str]:
    """Return what lies between edges; the first span has all that is less, down to `least`."""
    spans = [f"{number(low)} to {number(high)}" for low, high in itertools.pairwise(edges)]
    return [f"up to {number(edges[1])}", *spans[1:]] if least < edges[0] else spans


def lengths(edges: Sequence[float]) -> list[str]:
    """Return the whole numbers that lie between edges."""
    spans = [(low, high - 1) for low, high in itertools.pairwise(edges)]
    return [number(low) if low == last else f"{number(low)} to {number(last)}" for low, last in spans]
