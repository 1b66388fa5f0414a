"""The summary of a finished job, from the metrics of its requests."""

from collections import defaultdict
from typing import Any

from jobs import records

PERCENTILES = (50, 90, 99)
LATENCIES = ("queue_seconds", "ttft_seconds", "inter_token_seconds", "e2e_seconds")


class Summary:
    """Gathers metrics one by one; holds some numbers per request, no text."""

    def __init__(self) -> None:
        self.usage = self._computed_usage = records.NO_USAGE
        self._latencies: dict[str, list[float]] = {name: [] for name in LATENCIES}
        self._spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._computed = self._deduplicated = self._retried = 0
        self._drafted = self._accepted = 0
        self._padding = self._padded = 0

    def add(self, metrics: dict[str, Any], usage: records.Usage) -> None:
        """Take the metrics and the usage of one finished request."""
        self.usage = records.added(self.usage, usage)
        if metrics["deduplicated_from"] is not None:
            self._deduplicated += 1
            return
        self._computed += 1
        self._computed_usage = records.added(self._computed_usage, usage)
        self._retried += metrics["attempts"] > 0
        self._drafted += metrics.get("draft_tokens", 0)  # parts of an earlier version have none
        self._accepted += metrics.get("draft_tokens_accepted", 0)
        if (padding := metrics.get("padding_tokens")) is not None:
            self._padding += padding
            self._padded += usage[0] * max(1, metrics["choices"])  # an embedding has none
        for name, values in self._latencies.items():
            if metrics[name] is not None:
                values.append(metrics[name])
        self._spans[metrics["worker"]].append((metrics["started_at"], metrics["finished_at"]))

    def build(self, counts: dict[str, int], created_at: float, cost_per_hour: float | None) -> dict[str, Any]:
        """Return `summary.json`: ratios are null when nothing ran, that of padding when nothing was padded.

        Tokens count every request; rates and the prefix hit ratio only those that were computed.
        """
        prompt, cached, completion, reasoning = self.usage
        read, reused, made, _ = self._computed_usage
        last = max((end for spans in self._spans.values() for _, end in spans), default=created_at)
        first = min((start for spans in self._spans.values() for start, _ in spans), default=created_at)
        worker_seconds = sum(_covered(spans) for spans in self._spans.values())
        ran = self._computed + self._deduplicated
        return {
            "counts": counts,
            "tokens": {
                "prompt": prompt,
                "cached": cached,
                "completion": completion,
                "reasoning": reasoning,
            },
            "latency": {name: _percentiles(values) for name, values in self._latencies.items()},
            "seconds": last - created_at,
            "running_seconds": last - first,
            "tokens_per_second": made / (last - first) if last > first else None,
            "prefix_hit_ratio": reused / read if read else None,
            "dedupe_ratio": self._deduplicated / ran if ran else None,
            "padding_ratio": self._padding / (self._padding + self._padded) if self._padded else None,
            "draft_tokens": self._drafted,
            "draft_acceptance": self._accepted / self._drafted if self._drafted else None,
            "retried_requests": self._retried,
            "workers": len(self._spans),
            "worker_seconds": worker_seconds,
            "cost": None if cost_per_hour is None else worker_seconds / 3600 * cost_per_hour,
        }


def percentile(ordered: list[float], percent: float) -> float:
    """Return the nearest-rank percentile of a sorted list that is not empty."""
    return ordered[rank(len(ordered), percent) - 1]


def rank(number: int, percent: float) -> int:
    """Return which of so many sorted values is the percentile, from 1 on."""
    return int(max(1, -(-number * percent // 100)))


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of time spans, in seconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
