"""How values spread: counted one by one in little memory, shown as bars with percentiles."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from jobs import summary

_FINE = 36
"""Bins of time for each doubling: 1.9 % wide, so that the middle of one is within 1 % of all in it."""
_LOWEST = -14 * _FINE
"""The bin of 61 µs; less counts as that."""
_MERGED = (1, 3, 9, 18, 36)
"""How many bins can make one bar."""
_BARS, _FEWEST = 50, 12
_TAIL = 2.0
"""Bars of lengths end at twice the 99th percentile: one straggler must not squeeze the rest."""
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Spread:
    """Counts between edges, one more than counts; each bar has its lower edge in it.

    Times have edges that grow by one factor, whole numbers by one step. The first bar also has what is less
    than its edge; `beyond` are right of the last.
    """

    edges: list[float]
    counts: list[int]
    beyond: int
    p50: float
    p90: float
    p99: float
    least: float
    mean: float
    most: float

    @property
    def percentiles(self) -> dict[str, float]:
        """The percentiles by name."""
        return {f"p{percent}": getattr(self, f"p{percent}") for percent in summary.PERCENTILES}

    def exactly(self, known: Mapping[str, float]) -> Self:
        """Return this with percentiles that are known exactly."""
        return replace(self, p50=known["p50"], p90=known["p90"], p99=known["p99"])


class _Counted:
    """Values by the place they are counted at; places are in the order of the values."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = self._most = 0.0
        self._least = math.inf

    def _add(self, place: int, value: float) -> None:
        self._counts[place] += 1
        self._total += value
        self._least, self._most = min(self._least, value), max(self._most, value)

    def _places(self) -> dict[int, int]:
        """Return the place of each percentile, by the rule of a job's summary."""
        number, seen = self._counts.total(), 0
        ranks: dict[int, int] = {}
        wanted = [(percent, summary.rank(number, percent)) for percent in summary.PERCENTILES]
        for place in sorted(self._counts):
            seen += self._counts[place]
            ranks |= {percent: place for percent, rank in wanted if rank <= seen and percent not in ranks}
        return ranks

    def _spread(
        self, edges: list[float], counts: list[int], percentiles: dict[int, float], beyond: int = 0
    ) -> Spread:
        mean = self._total / self._counts.total()
        named = {f"p{percent}": value for percent, value in percentiles.items()}
        return Spread(edges, counts, beyond, **named, least=self._least, mean=mean, most=self._most)


class Times(_Counted):
    """Counts times in seconds. Their percentiles are estimates, within 1 % or a tenth of a millisecond."""

    def add(self, seconds: float) -> None:
        """Count a time; clocks of two machines differ, so that one below zero is zero."""
        seconds = max(0.0, seconds)
        place = math.floor(math.log2(seconds) * _FINE) if seconds > 0 else _LOWEST
        self._add(max(_LOWEST, place), seconds)

    def build(self) -> Spread | None:
        """Return how the times spread, None of none."""
        if not self._counts:
            return None
        low, high = min(self._counts), max(self._counts)
        merged = next((n for n in _MERGED if high // n - low // n < _BARS), _MERGED[-1])
        # A hair's breadth is not blown up: it is seen between empty bars.
        more = max(0, _FEWEST - (high // merged - low // merged)) // 2
        first, last = max(_LOWEST // merged, low // merged - more), high // merged + more
        counts = [0] * (last - first + 1)
        for place, count in self._counts.items():
            counts[place // merged - first] += count
        edges = [2.0 ** (bar * merged / _FINE) for bar in range(first, last + 2)]
        middles = {percent: 2.0 ** ((place + 0.5) / _FINE) for percent, place in self._places().items()}
        return self._spread(edges, counts, {p: self._seen(middle) for p, middle in middles.items()})

    def _seen(self, estimate: float) -> float:
        return min(max(estimate, self._least), self._most)


class Lengths(_Counted):
    """Counts whole numbers that are not negative; their percentiles are exact."""

    def add(self, length: int) -> None:
        """Count a length."""
        self._add(int(length), length)

    def build(self) -> Spread | None:
        """Return how the lengths spread, None where none is more than zero."""
        if not self._most:
            return None
        percentiles = {percent: float(place) for percent, place in self._places().items()}
        end = int(min(self._most, _TAIL * max(1.0, percentiles[99])))
        # From 0, unless that left half of the picture empty; a hair's breadth is not blown up.
        start = int(self._least) if end / 2 <= self._least < 0.9 * end else 0
        width = math.ceil(_round((end - start) / _BARS))
        start = start // width * width
        counts = [0] * ((end - start) // width + 1)
        beyond = 0
        for length, count in self._counts.items():
            bar = (length - start) // width
            if bar < len(counts):
                counts[bar] += count
            else:
                beyond += count
        edges = [float(start + bar * width) for bar in range(len(counts) + 1)]
        return self._spread(edges, counts, percentiles, beyond)


def _round(width: float) -> float:
    """Return the next round number (1, 2, 2.5 or 5 times a power of ten) that is not less, 1 at least."""
    width = max(1.0, width)
    power = 10.0 ** math.floor(math.log10(width))
    return next(step * power for step in _ROUND if step * power >= width * (1 - 1e-9))
