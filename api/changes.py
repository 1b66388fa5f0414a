"""What changes: one look at the ledger for all who listen, and none while nobody does."""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import redis

from api import queue, workers
from api.context import Context
from jobs import errors, ids, index, views
from jobs.ledger import Job

log = logging.getLogger(__name__)

MOST_LISTENERS = 256
MOST_OF_TENANT = 32
_KEPT = 4096
"""Events that are kept for those who come back."""
_KEPT_BYTES = 8 << 20
"""All of them together: a batch that failed tells up to 1,000 errors of its input each time."""
_PACE_SECONDS = 1.0
_MOST_PACE_SECONDS = 4.0
_SHARE = 0.1
"""How much of the time is spent looking, while the pace allows."""
_AT_ONCE = 200
_LATE_SECONDS = 15.0
"""How much later than the time in its id a job may become known: clocks differ, and inputs take time."""
_STAY_SECONDS = 60.0
"""How long it goes on looking when nobody listens: a page that reloads misses nothing."""


@dataclass(frozen=True)
class News:
    """An event. `tenant` is whose it is; None: everybody's."""

    number: int
    tenant: str | None
    name: str
    data: bytes


class Changes:
    """Looks at the open jobs of tenants that are listened to, and keeps what changed; for one event loop.

    Events are `batch` (a Batch), `gone` (one that was deleted), `queue`, `workers`, and `status`, which says
    whether Redis and the store answer.
    """

    def __init__(self, context: Context) -> None:
        self.epoch = ids.ulid()
        self.news: deque[News] = deque()
        self._bytes = 0
        self.last = 0
        self.reachable = True
        self._look = Look(context)
        self._listeners: Counter[str] = Counter()
        self._left: dict[str, float] = {}
        self._known: frozenset[str] = frozenset()
        self._fresh, self._wake = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def listening(self, tenant: str) -> Iterator[None]:
        """Have the tenant's jobs looked at meanwhile; raise Unavailable when too many listen."""
        # Nothing is awaited between the look and the count: of many who come at once none slips in.
        if self._listeners[tenant] >= MOST_OF_TENANT or self._listeners.total() >= MOST_LISTENERS:
            raise errors.Unavailable("Too many listen to events. Ask again later, or look now and then.")
        self._listeners[tenant] += 1
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._listeners[tenant] -= 1
            self._left[tenant] = time.monotonic()

    async def known(self, tenant: str) -> None:
        """Wait until the tenant's jobs have been looked at once: from then on nothing is missed."""
        while tenant not in self._known and self.reachable:
            await self._fresh.wait()

    async def wait(self, seconds: float) -> None:
        """Wait for news of anybody, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._fresh.wait(), seconds)

    def after(self, number: int, tenant: str) -> list[News] | None:
        """Return the tenant's events behind that number; None when some of them are not kept any more."""
        if number < self.last - len(self.news):
            return None
        behind = (one for one in self.news if one.number > number)
        return [one for one in behind if one.tenant in (None, tenant)]

    def keep(self, news: News) -> None:
        """Keep an event for those who come back, and let the oldest go."""
        if len(self.news) == _KEPT:
            self._bytes -= len(self.news.popleft().data)
        self.news.append(news)
        self._bytes += len(news.data)
        while self._bytes > _KEPT_BYTES and len(self.news) > 1:
            self._bytes -= len(self.news.popleft().data)

    def stop(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while tenants := self._listened():
            self._wake.clear()
            began = time.monotonic()
            reachable, found = await asyncio.to_thread(self._look, tenants)
            looked = frozenset(tenants)
            self._known = looked if reachable else self._known & looked
            if reachable != self.reachable:
                self.reachable = reachable
                found.insert(0, (None, "status", {"reachable": reachable}))
            for tenant, name, data in found:
                self.last += 1
                self.keep(News(self.last, tenant, name, orjson.dumps(data)))
            if found:
                # Whoever waits has this event; the next news set a new one.
                self._fresh.set()
                self._fresh = asyncio.Event()
            pause = (time.monotonic() - began) / _SHARE
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), min(max(_PACE_SECONDS, pause), _MOST_PACE_SECONDS))

    def _listened(self) -> list[str]:
        now = time.monotonic()
        stale = [name for name, at in self._left.items() if now - at > _STAY_SECONDS]
        for name in stale:
            if not self._listeners[name]:
                del self._listeners[name], self._left[name]
        return list(self._listeners)


Found = list[tuple[str | None, str, Any]]


class Look:
    """What was seen last of each tenant, and how that differs from now. For one thread at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.batches: dict[str, dict[str, Job]] = {}
        self._queues: dict[str, queue.Queue] = {}
        self._recent: dict[str, tuple[float, frozenset[str]]] = {}
        self._workers: list[workers.Worker] | None = None

    def __call__(self, tenants: list[str]) -> tuple[bool, Found]:
        """Return whether Redis and the store answer, and what changed."""
        found: Found = []
        try:
            for gone in self.batches.keys() - set(tenants):
                del self.batches[gone]
                self._queues.pop(gone, None)
                self._recent.pop(gone, None)
            for tenant in tenants:
                self._of_tenant(tenant, found)
            self._of_workers(found)
        except (redis.RedisError, errors.LonghaulError):
            return False, found
        except Exception:
            log.exception("changes not seen")
            return False, found
        return True, found

    def _of_tenant(self, tenant: str, found: Found) -> None:
        now = self._jobs(tenant)
        before = self.batches.setdefault(tenant, now)
        changed = [
            name
            for name in before.keys() | now.keys()
            if self._told(before.get(name)) != self._told(now.get(name))
        ]
        for name in changed:
            self._tell(tenant, name, found)
            # Only now: what could not be told, since the store is away, is told by the next look.
            if name in now:
                before[name] = now[name]
            else:
                del before[name]
        depth = queue.of(self._context, tenant)
        if depth != self._queues.get(tenant):
            self._queues[tenant] = depth
            found.append((tenant, "queue", depth.model_dump()))
        self._of_recent(tenant, now, found)

    def _of_recent(self, tenant: str, now: dict[str, Job], found: Found) -> None:
        """Tell of jobs that came and ended between two looks: they are never seen open."""
        at = time.time()
        first = tenant not in self._recent
        since, known = self._recent.get(tenant, (at, frozenset()))
        names = set(index.since(self._context.store, tenant, since - _LATE_SECONDS))
        told: Found = []
        for name in sorted(names - known - now.keys()):
            self._tell(tenant, name, told)
            if told[-1][1] == "batch" and told[-1][2]["status"] not in views.TERMINAL:
                names.remove(name)  # made just now, and perhaps ended by the next look
        found += [] if first else told
        self._recent[tenant] = at, frozenset(names)

    def _jobs(self, tenant: str) -> dict[str, Job]:
        """Return the tenant's open jobs by id, some at a time: a script keeps all others from Redis."""
        ledger = self._context.ledger
        known: dict[str, Job] = {}
        names = ledger.tenants.open_jobs(tenant)
        for first in range(0, len(names), _AT_ONCE):
            found = ledger.jobs(names[first : first + _AT_ONCE])
            known.update((job.id, job) for job in found if job is not None)
        return known

    @staticmethod
    def _told(job: Job | None) -> object:
        """Return what a Batch tells of a job."""
        if job is None:
            return None
        return job.state, job.model, job.total, job.completed, job.failed, job.usage, job.times

    def _tell(self, tenant: str, name: str, found: Found) -> None:
        try:
            found.append((tenant, "batch", self._context.batches.get(tenant, name).model_dump()))
        except errors.NotFound:
            found.append((tenant, "gone", {"id": name}))

    def _of_workers(self, found: Found) -> None:
        now = workers.of(self._context)
        # Each look finds them older, busy or not: that alone is no news.
        seen = [one.model_copy(update={"age_seconds": 0, "idle_seconds": 0}) for one in now.data]
        if seen != self._workers:
            self._workers = seen
            found.append((None, "workers", now.model_dump()))
