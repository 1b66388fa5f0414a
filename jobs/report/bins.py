"""Put many numbers into few bins: values into a histogram, spans of time into a series."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jobs import summary

BINS = 50
SLOTS = 120
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LEAST = 1e-9
"""Less is 0 to a clock, and too small to divide."""
_TAIL = 2.0
"""A histogram ends at twice the 99th percentile: one straggler must not squeeze the rest."""


@dataclass(frozen=True)
class Histogram:
    """Counts of values from `start` on in bins of one width; `beyond` lie right of the last."""

    start: float
    width: float
    counts: list[int]
    beyond: int
    percentiles: dict[str, float]
    least: float
    mean: float
    most: float


def histogram(values: Sequence[float], whole: bool = False) -> Histogram | None:
    """Return the histogram of values that are not negative, None of none; `whole`: they are whole numbers."""
    if not values:
        return None
    ordered = sorted(values)
    percentiles = {f"p{percent}": summary.percentile(ordered, percent) for percent in summary.PERCENTILES}
    end = min(ordered[-1], _TAIL * percentiles["p99"])
    end = end if end > _LEAST else 1.0
    # From 0, unless that left half of the picture empty; a hair's breadth is not blown up.
    start = ordered[0] if end / 2 <= ordered[0] < 0.9 * end else 0.0
    width = nice((end - start) / BINS)
    width = float(max(1, math.ceil(width))) if whole else width
    start = math.floor(start / width) * width
    counts = [0] * (int((end - start) / width) + 1)
    places = [int((value - start) / width) for value in ordered]
    for place in places:
        if place < len(counts):
            counts[place] += 1
    beyond = len(ordered) - sum(counts)
    mean = math.fsum(ordered) / len(ordered)
    return Histogram(start, width, counts, beyond, percentiles, ordered[0], mean, ordered[-1])


def nice(width: float) -> float:
    """Return the next round number (1, 2, 2.5 or 5 times a power of ten) that is not less."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in _STEPS if step * power >= width * (1 - 1e-9))


class Series:
    """An amount that spans of time add to, as its mean in each slot; each span costs the same, long or short.

    `start` and `end` in unix seconds. What lies outside of them is cut off.
    """

    def __init__(self, start: float, end: float) -> None:
        self.start = start
        self.width = nice(max(end - start, 1e-3) / SLOTS)
        slots = max(1, math.ceil((end - start) / self.width - 1e-9))
        self._inside = [0.0] * (slots + 1)
        self._edges = [0.0] * slots

    def add(self, start: float, end: float, rate: float) -> None:
        """Add `rate` (a second, or of things at once) from `start` to `end`."""
        first, left = self._slot(start)
        last, right = self._slot(end)
        if first == last:
            self._edges[first] += rate * max(0.0, right - left)
            return
        self._edges[first] += rate * (1.0 - left)
        self._edges[last] += rate * right
        self._inside[first + 1] += rate
        self._inside[last] -= rate

    def means(self) -> list[float]:
        """Return the mean of each slot."""
        found, level = [], 0.0
        for inside, edge in zip(self._inside, self._edges, strict=False):
            level += inside
            found.append(max(0.0, level + edge))
        return found

    def _slot(self, at: float) -> tuple[int, float]:
        """Return the slot of a moment, and how much of that lies before it (0 to 1)."""
        place = min(max((at - self.start) / self.width, 0.0), float(len(self._edges)))
        slot = min(int(place), len(self._edges) - 1)
        return slot, place - slot
