"""A histogram that takes many values at once: prometheus_client's own costs a microsecond for each."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from threading import Lock

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jobs.metrics.families import Family


class Histogram(Collector):
    """Counts values up to each of some bounds, by the values of the labels."""

    def __init__(self, family: Family, bounds: Sequence[float]) -> None:
        self.family = family
        self._bounds = [*bounds, math.inf]
        self._names = ["+Inf" if bound == math.inf else str(float(bound)) for bound in self._bounds]
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        self._lock = Lock()

    def observe(self, labels: tuple[str, ...], values: Iterable[float]) -> None:
        """Count these values; safe for threads."""
        bounds = self._bounds
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * len(bounds))
            total = self._sums.get(labels, 0.0)
            for value in values:
                counts[bisect_left(bounds, value)] += 1
                total += value
            self._sums[labels] = total

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self.family.full_name, self.family.help)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.family.full_name, self.family.help, labels=self.family.labels)
        with self._lock:
            found = [(labels, list(counts), self._sums[labels]) for labels, counts in self._counts.items()]
        for labels, counts, total in found:
            family.add_metric(labels, list(zip(self._names, accumulate(counts), strict=True)), total)
        yield family
