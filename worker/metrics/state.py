"""What a worker is doing, read from its own words (`Service.stats`) at each scrape."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jobs import ledger_types
from jobs.metrics.families import Family
from worker.metrics import counters

NO_MODEL = "none"
"""The label of a worker that serves control alone."""
FAMILIES = STATE, HELD, GROUPS, BATCH, SLOTS, COST, UNITS = (
    Family(
        "worker_state",
        "gauge",
        "1 for what it is: loading, serving, retiring, draining, stopped.",
        ("model", "state"),
    ),
    Family("requests_held", "gauge", "Requests leased to it: waiting, running, or not yet written."),
    Family("groups_claimed_total", "counter", "Groups it claimed."),
    Family("batch_size", "gauge", "Requests in the running batch."),
    Family("slots_used_ratio", "gauge", "batch_size of max_running."),
    Family("cost_total", "counter", "What it has cost since it started, where cost_per_hour is set."),
    Family(
        "units_ended_total",
        "counter",
        "Units of jobs it ran, by how they ended: done, failed.",
        ("unit", "outcome"),
    ),
)


def units_ended(registry: CollectorRegistry) -> Counter:
    """Return the counter of units that ended."""
    made = Counter(UNITS.full_name, UNITS.help, UNITS.labels, registry=registry)
    for unit in ledger_types.UNITS:
        made.labels(unit, "failed")
    return made


class State(Collector):
    """The metrics of a worker and its engine."""

    def __init__(self, stats: Callable[[], dict[str, Any]], cost_per_hour: float | None = None) -> None:
        self._stats, self._cost = stats, cost_per_hour

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not ask."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        model = stats["model"] or NO_MODEL
        mine = (model,)
        yield STATE.of(((model, stats["state"]), 1))
        yield HELD.of((mine, stats["held"]))
        yield GROUPS.of((mine, stats["groups"]))
        if self._cost is not None:
            yield COST.of((mine, stats["uptime_seconds"] / 3600 * self._cost))
        if stats["engine"] is not None:
            yield BATCH.of((mine, stats["running"]))
            yield SLOTS.of((mine, stats["running"] / stats["slots"]))
            yield from counters.of(model, stats["engine"])
