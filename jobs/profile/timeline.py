"""What a job did over time: sums in bins of one width, which grows with the time."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MOST_BINS = 240
_WIDTHS = (
    1, 5, 10, 50, 100, 500, 1000, 5000, 10_000, 30_000, 60_000, 300_000, 600_000, 1_800_000, 3_600_000,
    10_800_000, 43_200_000, 86_400_000,
)  # fmt: skip
"""Round widths in milliseconds: each holds a whole number of the one before, so that bins can be merged."""
_COLUMNS = _RUNNING, _OUTPUT, _READ, _CACHED = range(4)


@dataclass(frozen=True)
class OverTime:
    """Bins of `bin_seconds` from `began_at` (unix seconds) on.

    `running` is the mean number of requests that ran at once; tokens are sums of a bin; `requests` are those
    that finished in it. While a job runs, requests that have not finished are still missing from the last
    `longest_seconds`. `mean_running` is the mean from the first request's start to the last one's end.
    """

    began_at: float
    bin_seconds: float
    longest_seconds: float
    mean_running: float
    running: list[float]
    output_tokens: list[float]
    read_tokens: list[float]
    cached_tokens: list[float]
    requests: list[int]

    def per_second(self, tokens: list[float]) -> list[float]:
        """Return sums of bins as rates."""
        return [amount / self.bin_seconds for amount in tokens]


class Timeline:
    """Takes requests in any order, each at the same cost, in at most some 240 bins."""

    def __init__(self) -> None:
        self._milliseconds = _WIDTHS[0]
        self._sums = _bins()
        # What every bin from one on has more than the bins before: long spans cost no more than short ones.
        self._steps = _bins()
        self._requests: dict[int, int] = defaultdict(int)
        self._longest = self._ran = 0.0
        self._first, self._last = math.inf, -math.inf

    def add(self, metrics: dict[str, Any]) -> None:
        """Take a request that ran.

        Its prompt is spread evenly over the time until its first token, its output over the time from then
        on; where that moment is not known, or is the end, both over the whole run.
        """
        began = metrics["started_at"]
        ended = max(metrics["finished_at"], began)
        self._make_room(began, ended)
        first = began + (metrics["ttft_seconds"] or 0.0)
        read, made = ((began, first), (first, ended)) if began < first < ended else ((began, ended),) * 2
        cached = metrics["cached_tokens"] or 0  # null: the engine does not know
        self._spread(_RUNNING, began, ended, ended - began)
        self._spread(_OUTPUT, *made, metrics["completion_tokens"])
        self._spread(_READ, *read, metrics["prompt_tokens"] - cached)
        self._spread(_CACHED, *read, cached)
        self._requests[self._place(ended)] += 1
        self._ran += ended - began
        self._longest = max(self._longest, ended - began)

    def build(self) -> OverTime | None:
        """Return the bins, None when nothing ran."""
        if not self._requests:
            return None
        places = range(self._place(self._first), self._place(self._last) + 1)
        seconds = self._last - self._first

        def sums(column: int, unit: float = 1.0) -> list[float]:
            return [round(amount / unit, 3) for amount in self._amounts(column, places)]

        return OverTime(
            began_at=places[0] * self._width,
            bin_seconds=self._width,
            longest_seconds=self._longest,
            mean_running=round(self._ran / seconds, 3) if seconds > 0 else 0.0,
            running=sums(_RUNNING, self._width),
            output_tokens=sums(_OUTPUT),
            read_tokens=sums(_READ),
            cached_tokens=sums(_CACHED),
            requests=[self._requests.get(place, 0) for place in places],
        )

    @property
    def _width(self) -> float:
        return self._milliseconds / 1000

    def _place(self, at: float) -> int:
        return _milliseconds(at) // self._milliseconds

    def _spread(self, column: int, start: float, end: float, amount: float) -> None:
        sums, steps = self._sums[column], self._steps[column]
        first, last = self._place(start), self._place(end)
        if first == last:
            sums[first] += amount
            return
        rate = amount / (end - start)
        sums[first] += rate * ((first + 1) * self._width - start)
        sums[last] += rate * (end - last * self._width)
        steps[first + 1] += rate * self._width
        steps[last] -= rate * self._width

    def _amounts(self, column: int, places: range) -> Iterator[float]:
        sums, steps, level = self._sums[column], self._steps[column], 0.0
        for place in places:
            level += steps.get(place, 0.0)
            yield max(0.0, level + sums.get(place, 0.0))

    def _make_room(self, began: float, ended: float) -> None:
        before = range(self._place(self._first), self._place(self._last) + 1) if self._requests else range(0)
        self._first, self._last = min(self._first, began), max(self._last, ended)
        width, first, last = self._milliseconds, _milliseconds(self._first), _milliseconds(self._last)
        while last // width - first // width >= _MOST_BINS:
            width = next((wider for wider in _WIDTHS if wider > width), 2 * width)
        if width > self._milliseconds:
            self._merge(before, width // self._milliseconds)
            self._milliseconds = width

    def _merge(self, places: range, many: int) -> None:
        merged = _bins()
        requests: dict[int, int] = defaultdict(int)
        for column in _COLUMNS:
            for place, amount in zip(places, self._amounts(column, places), strict=True):
                merged[column][place // many] += amount
        for place, number in self._requests.items():
            requests[place // many] += number
        self._sums, self._steps, self._requests = merged, _bins(), requests


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _bins() -> list[dict[int, float]]:
    return [defaultdict(float) for _ in _COLUMNS]
