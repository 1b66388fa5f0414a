"""What the ledger tells: the queue's depth, what runs, and how fast deadlines ask work to go."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from threading import Lock

import redis
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jobs import deadlines, errors
from jobs.files import made_at
from jobs.ledger import Ledger
from jobs.ledger_scripts import Keys
from jobs.metrics.families import Family, model_of

FRESH_SECONDS = 2.0
"""How long an answer is given again: whoever asks, and however often, Redis is asked so much and no more."""
FAMILIES = UP, QUEUED, LEASED, RUNNING, SUSPECTS, UNITS, FED, JOBS, OLDEST, DEADLINE, NEEDED, OPEN = (
    Family("redis_up", "gauge", "1 if Redis answers.", ()),
    Family("requests_queued", "gauge", "Requests waiting, by length bucket.", ("model", "bucket")),
    Family("requests_leased", "gauge", "Requests leased to workers, running or not."),
    Family("requests_running", "gauge", "Requests in a running batch."),
    Family("requests_suspected", "gauge", "Requests waiting to run apart, since a worker died running them."),
    Family("units_open", "gauge", "Open plan, feed and finalize units.", ()),
    Family("fed_bytes", "gauge", "Bytes of prompts in Redis.", ()),
    Family("jobs_open", "gauge", "Jobs with a deadline ahead.", ()),
    Family("oldest_job_seconds", "gauge", "Age of the oldest of them.", ()),
    Family("deadline_seconds", "gauge", "Seconds to the first deadline; absent without one.", ()),
    Family(
        "deadline_tokens_per_second",
        "gauge",
        "Prompt tokens that must finish each second for all planned jobs to be in time.",
    ),
    Family("open_tokens", "gauge", "Prompt tokens of planned jobs that are not finished."),
)


class Depth(Collector):
    """Asks the ledger, at most once every FRESH_SECONDS; without Redis there is only redis_up 0."""

    def __init__(self, ledger: Ledger, namespace: str) -> None:
        self._ledger, self._keys = ledger, Keys(namespace)
        self._lock = Lock()
        self._known: list[Metric] = []
        self._until = 0.0

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not ask Redis."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._known = self._asked()
                self._until = time.monotonic() + FRESH_SECONDS
            known = self._known
        yield from known

    def _asked(self) -> list[Metric]:
        try:
            found = [*self._depth(), *of_deadlines(self._due(), time.time())]
        except (redis.RedisError, errors.RedisUnreachable):
            return [UP.of(((), 0))]
        return [UP.of(((), 1)), *found]

    def _due(self) -> list[deadlines.Due]:
        return deadlines.read(self._ledger.redis, self._keys)

    def _depth(self) -> Iterator[Metric]:
        depth = self._ledger.depth()
        running = self._running(list(depth.models))
        # One name may have several fingerprints: what its weights were before is still being worked off.
        counts: dict[Family, Counter[tuple[str, ...]]] = defaultdict(Counter)
        for fingerprint, model in depth.models.items():
            name = model_of(fingerprint)
            counts[LEASED][(name,)] += model["leased"]
            counts[RUNNING][(name,)] += running[fingerprint]
            counts[SUSPECTS][(name,)] += model["suspects"]
            for bucket, count in model["buckets"].items():
                counts[QUEUED][(name, str(bucket))] += count
        for family in (QUEUED, LEASED, RUNNING, SUSPECTS):
            yield family.of(*counts[family].items())
        yield UNITS.of(((), depth.control))
        yield FED.of(((), depth.fed_bytes))

    def _running(self, fingerprints: list[str]) -> dict[str, int]:
        with self._ledger.redis.pipeline(transaction=False) as asked:
            for name in fingerprints:
                asked.scard(self._keys.name("running", name))
            return dict(zip(fingerprints, asked.execute(), strict=True))


def of_deadlines(jobs: Iterable[deadlines.Due], now: float) -> Iterator[Metric]:
    """Yield what deadlines ask for."""
    jobs = list(jobs)
    yield JOBS.of(((), len(jobs)))
    if jobs:
        yield OLDEST.of(((), max(0.0, now - min(made_at(job.job_id) for job in jobs))))
        yield DEADLINE.of(((), min(job.expires_at for job in jobs) - now))
    rates: dict[tuple[str, ...], float] = defaultdict(float)
    left: dict[tuple[str, ...], float] = defaultdict(float)
    for fingerprint, rate in deadlines.needed(jobs, now).items():
        rates[(model_of(fingerprint),)] += rate
    for job in jobs:
        if job.fingerprint is not None:
            left[(model_of(job.fingerprint),)] += job.tokens
    yield NEEDED.of(*rates.items())
    yield OPEN.of(*left.items())
