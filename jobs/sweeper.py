"""Who sweeps, and when: one process of all, every `sweep_seconds`, or whoever is told to."""

import contextlib
import logging
import time
from collections.abc import Iterator
from threading import Event

import redis
from redis import exceptions

from jobs import errors, sweep
from jobs.settings import Settings
from jobs.store import ObjectStore

log = logging.getLogger(__name__)
_LEASE_SECONDS = 300
_EXTEND_SECONDS = 10
_PAUSE_SECONDS = 0.05


class SweepRuns(errors.LonghaulError):
    """A sweep runs already. Try again when it has ended."""


class Stopped(Exception):
    """The process ends; what is left to do is found by the next sweep."""


class Sweeper:
    """Sweeps a store, one at a time over all processes of a namespace."""

    def __init__(self, settings: Settings, client: redis.Redis, store: ObjectStore) -> None:
        self._settings, self._redis, self._store = settings, client, store
        self.stopping = Event()

    @property
    def check_seconds(self) -> float:
        """How often to ask whether a sweep is due."""
        return min(self._settings.sweep_seconds, 60)

    def turn(self) -> None:
        """Sweep if it is due and nobody does."""
        milliseconds = max(1, int(self._settings.sweep_seconds * 1000))
        if self._redis.set(self._name("swept"), "", nx=True, px=milliseconds):
            with contextlib.suppress(SweepRuns, Stopped):
                self.run()

    def run(self, *, everything: bool = False, dry_run: bool = False) -> sweep.Removed:
        """Sweep now; raises SweepRuns. What breaks off is done by the next one."""
        started = time.monotonic()
        with self._lease() as extend:
            task = sweep.Sweep(
                self._store,
                self._settings.scratch_dir,
                everything=everything,
                dry_run=dry_run,
                pause=extend,
            )
            try:
                return task.run()
            finally:
                if not dry_run:
                    log.info("swept", extra=_facts(task.removed, time.monotonic() - started))

    @contextlib.contextmanager
    def _lease(self) -> Iterator["Lease"]:
        # Long, since a call to the store may take its time; a process that dies costs one sweep.
        lock = self._redis.lock(self._name("sweep"), timeout=_LEASE_SECONDS, thread_local=False)
        if not lock.acquire(blocking=False):
            raise SweepRuns()
        try:
            yield Lease(lock, self.stopping)
        finally:
            with contextlib.suppress(exceptions.LockError):  # it ran out: that ended the sweep
                lock.release()

    def _name(self, kind: str) -> str:
        return f"{{{self._settings.namespace}}}:{kind}"


class Lease:
    """The pause of a sweep: leaves the store to others for a moment, and keeps the lease."""

    def __init__(self, lock: "redis.lock.Lock", stopping: Event) -> None:
        self._lock, self._stopping = lock, stopping
        self._extended = time.monotonic()

    def __call__(self) -> None:
        if self._stopping.wait(_PAUSE_SECONDS):
            raise Stopped()
        if time.monotonic() > self._extended + _EXTEND_SECONDS:
            self._lock.extend(_LEASE_SECONDS, replace_ttl=True)
            self._extended = time.monotonic()


def _facts(removed: sweep.Removed, seconds: float) -> dict[str, object]:
    return {
        "removed": dict(removed.objects),
        "bytes": removed.bytes.total(),
        "seconds": round(seconds, 3),
    }
