"""What both API and workers count: the store, leases that ran out, requests that finished.

One process has one of each, whichever module counts.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client import Histogram as Timed

from jobs.metrics.families import Family

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each: nobody asks for it
_PUT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

FAMILIES = PUT, ERRORS, EXPIRED, FINISHED, LATE = (
    Family("store_put_seconds", "histogram", "Writing one object, tries and pauses included.", ()),
    Family(
        "store_errors_total",
        "counter",
        "Calls to the store that failed, those that were made again with success included.",
        (),
    ),
    Family("leases_expired_total", "counter", "Leases of workers not heard of that this process took back."),
    Family(
        "requests_finished_total",
        "counter",
        "Requests whose result is written, by how they ended: stop, length, tool_calls, embedded; refused,"
        " engine_error, worker_lost.",
        ("model", "reason"),
    ),
    Family("jobs_expired_total", "counter", "Jobs that this process found past their deadline.", ()),
)
REASONS = ("stop", "length", "tool_calls", "embedded", "refused", "engine_error", "worker_lost")


def _counter(family: Family) -> Counter:
    return Counter(family.full_name, family.help, family.labels, registry=None)


store_put = Timed(PUT.full_name, PUT.help, buckets=_PUT_BOUNDS, registry=None)
store_errors, leases_expired, requests_finished, jobs_expired = map(
    _counter, (ERRORS, EXPIRED, FINISHED, LATE)
)


def register(registry: CollectorRegistry, models: Iterable[str] = ()) -> None:
    """Have a registry show them, those of these models from 0 on: to Prometheus a series that begins with 1
    is no increase. If only failures began with 0, a first one would be all of the requests that it sees.
    """
    for metric in (store_put, store_errors, leases_expired, requests_finished, jobs_expired):
        registry.register(metric)
    for model in models:
        leases_expired.labels(model)
        for reason in REASONS:
            requests_finished.labels(model, reason)
