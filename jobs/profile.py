"""The profile of a job: how its latencies and lengths spread, its rates over time, and its errors by code.

It is gathered row by row in little memory, so that it can be shown while the job runs.
"""

import math
from collections import Counter
from typing import Any

from jobs.records import ResultRow
from jobs.summary import LATENCIES, PERCENTILES

LENGTHS = ("prompt_tokens", "completion_tokens")
MOST_ERRORS = 100
_MOST_MESSAGE = 500
_MOST_BINS = 240
_FIRST_BIN_SECONDS = 0.25
_STEPS = 4
"""Bounds of a histogram for each doubling."""
_LOWEST = -40
"""The first bound of a histogram, in steps: about a thousandth."""


class Histogram:
    """Counts values between bounds that are powers of the fourth root of two; zero counts as the lowest."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, value: float) -> None:
        """Count a value that is not negative."""
        step = math.ceil(round(math.log2(value) * _STEPS, 6)) if value > 0 else _LOWEST
        self._counts[max(_LOWEST, step)] += 1

    def shown(self) -> dict[str, Any] | None:
        """Return edges, one more than counts, and percentiles estimated within them; None without a value."""
        if not self._counts:
            return None
        first, last = min(self._counts), max(self._counts)
        edges = [2 ** (step / _STEPS) for step in range(first - 1, last + 1)]
        counts = [self._counts[step] for step in range(first, last + 1)]
        percentiles = {f"p{percent}": _percentile(edges, counts, percent) for percent in PERCENTILES}
        return {"edges": edges, "counts": counts, **percentiles}


class Timeline:
    """Sums over time, in at most some 240 bins of equal width, which doubles as the time grows."""

    columns = ("running", "output_tokens", "prompt_tokens", "cached_tokens", "requests")

    def __init__(self) -> None:
        self._width = _FIRST_BIN_SECONDS
        self._bins: dict[int, list[float]] = {}
        self._longest = 0.0
        self._first, self._last = math.inf, -math.inf

    def add(self, metrics: dict[str, Any]) -> None:
        """Take a request that ran: its output spread over the time it ran, the rest when it ended."""
        began = metrics["started_at"]
        ended = max(metrics["finished_at"], began)
        self._longest = max(self._longest, ended - began)
        self._make_room(began, ended)
        for place in range(int(began // self._width), int(ended // self._width) + 1):
            inside = min(ended, (place + 1) * self._width) - max(began, place * self._width)
            one = self._bins.setdefault(place, [0.0] * len(self.columns))
            one[0] += inside
            one[1] += metrics["completion_tokens"] * (inside / (ended - began) if ended > began else 1)
        last = self._bins[int(ended // self._width)]
        last[2] += metrics["prompt_tokens"]
        last[3] += metrics["cached_tokens"]
        last[4] += 1

    def shown(self) -> dict[str, Any] | None:
        """Return the columns with when the first bin begins (unix seconds); None when nothing ran.

        `running` is the mean number of requests that ran at once; the others are sums of a bin. While a job
        runs, requests that have not finished are still missing from the last `longest_seconds`.
        """
        if not self._bins:
            return None
        places = range(min(self._bins), max(self._bins) + 1)
        nothing = [0.0] * len(self.columns)
        columns = zip(*(self._bins.get(place, nothing) for place in places), strict=True)
        found = {
            name: [round(x, 3) for x in column] for name, column in zip(self.columns, columns, strict=True)
        }
        found["running"] = [round(seconds / self._width, 3) for seconds in found["running"]]
        return {
            "began_at": places[0] * self._width,
            "bin_seconds": self._width,
            "longest_seconds": self._longest,
            **found,
        }

    def _make_room(self, began: float, ended: float) -> None:
        self._first, self._last = min(self._first, began), max(self._last, ended)
        while self._last // self._width - self._first // self._width >= _MOST_BINS:
            self._width *= 2
            merged: dict[int, list[float]] = {}
            for place, sums in self._bins.items():
                old = merged.get(place // 2)
                merged[place // 2] = [a + b for a, b in zip(old, sums, strict=True)] if old else sums
            self._bins = merged


class Profile:
    """Gathers rows one by one, in any order."""

    def __init__(self) -> None:
        self.rows = 0
        self._latency = {name: Histogram() for name in LATENCIES}
        self._lengths = {name: Histogram() for name in LENGTHS}
        self._spreads = self._latency | self._lengths
        self._timeline = Timeline()
        self._codes: Counter[str] = Counter()
        self._errors: list[dict[str, Any]] = []

    def add(self, row: ResultRow) -> None:
        """Take a finished row. Those that another's answer served count, but have no times of their own."""
        self.rows += 1
        if row.failed:
            self._add_error(row)
        metrics = row.metrics
        if metrics is None or metrics["deduplicated_from"] is not None:
            return
        for name, histogram in self._spreads.items():
            if metrics[name] is not None:
                histogram.add(metrics[name])
        self._timeline.add(metrics)

    def shown(self) -> dict[str, Any]:
        """Return what was gathered; what nothing is known of is null."""
        return {
            "rows": self.rows,
            "latency": {name: histogram.shown() for name, histogram in self._latency.items()},
            "lengths": {name: histogram.shown() for name, histogram in self._lengths.items()},
            "timeline": self._timeline.shown(),
            "errors": {
                "by_code": dict(self._codes.most_common(50)),
                "first": sorted(self._errors, key=lambda error: error["request"]),
            },
        }

    def _add_error(self, row: ResultRow) -> None:
        error = _error(row.line)
        code = str(error.get("code") or error.get("type") or "unknown")
        self._codes[code] += 1
        if len(self._errors) < MOST_ERRORS:
            message = str(error.get("message") or "")[:_MOST_MESSAGE]
            facts = {"request": row.row + 1, "custom_id": row.line["custom_id"]}
            self._errors.append({**facts, "code": code, "message": message})


def _error(line: dict[str, Any]) -> dict[str, Any]:
    found = line.get("error") or ((line.get("response") or {}).get("body") or {}).get("error")
    return found if isinstance(found, dict) else {}


def _percentile(edges: list[float], counts: list[int], percent: float) -> float:
    left = sum(counts) * percent / 100
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        if count and left <= count:
            return float(low + (high - low) * left / count)
        left -= count
    return edges[-1]
