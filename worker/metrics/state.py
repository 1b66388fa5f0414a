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
FAMILIES = STATE, HELD, GROUPS, BATCH, SLOTS, COST, UNITS, SWAPS, LOADING, UNAVAILABLE = (
    Family(
        "worker_state",
        "gauge",
        "1 for what it is: loading, serving, retiring, draining, stopped. Of several models those that are"
        " not loaded have unloaded, or unavailable after a load that failed.",
        ("model", "state"),
    ),
    Family("requests_held", "gauge", "Requests leased to it: waiting, running, or not yet written."),
    Family("groups_claimed_total", "counter", "Groups it claimed."),
    Family("batch_size", "gauge", "Requests in the running batch."),
    Family("slots_used_ratio", "gauge", "batch_size of max_running."),
    Family(
        "cost_total",
        "counter",
        "What it has cost since it started, where cost_per_hour is set; a load is for what it loads.",
    ),
    Family(
        "units_ended_total",
        "counter",
        "Units of jobs it ran, by how they ended: done, failed.",
        ("unit", "outcome"),
    ),
    Family("model_swaps_total", "counter", "Times that it was loaded in place of another model."),
    Family(
        "model_loading_seconds_total",
        "counter",
        "Time in which the last model was closed and this one loaded, at the start too.",
    ),
    Family("model_unavailable", "gauge", "1: it could not be loaded, and is tried again after a pause."),
)


def units_ended(registry: CollectorRegistry) -> Counter:
    """Return the counter of units that ended, from 0 on: what begins with 1 is no increase to Prometheus."""
    made = Counter(UNITS.full_name, UNITS.help, UNITS.labels, registry=registry)
    for unit in ledger_types.UNITS:
        for outcome in ("done", "failed"):
            made.labels(unit, outcome)
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
        model, models = stats["model"] or NO_MODEL, stats["models"]
        mine = (model,)
        others = {name: its["state"] for name, its in models.items() if name != model}
        yield STATE.of(((model, stats["state"]), 1), *((place, 1) for place in others.items()))
        yield HELD.of((mine, stats["held"]))
        yield GROUPS.of(*(((name,), its["groups"]) for name, its in models.items()))
        yield SWAPS.of(*(((name,), its["swaps"]) for name, its in models.items()))
        yield LOADING.of(*(((name,), its["loading_seconds"]) for name, its in models.items()))
        yield UNAVAILABLE.of(*(((name,), its["state"] == "unavailable") for name, its in models.items()))
        if self._cost is not None:
            seconds = {name: its["seconds"] for name, its in models.items()}
            seconds = seconds or {model: stats["uptime_seconds"]}
            yield COST.of(*(((name,), its / 3600 * self._cost) for name, its in seconds.items()))
        if stats["engine"] is not None:
            yield BATCH.of((mine, stats["running"]))
            yield SLOTS.of((mine, stats["running"] / stats["slots"]))
        yield from counters.of(model, stats["engine"], stats["unloaded"])
