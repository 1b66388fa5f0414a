"""One process that does everything for a job, and that can be struck at each of its steps.

A step is a moment just before or just after a call to the ledger or the store. `Lives` runs a job with what
an API and a worker are made of, but in one thread, so that step number k is the same in each run.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import redis

from jobs import errors, recover, results, schema, views
from jobs.batches import Batches
from jobs.files import made_at
from jobs.ids import batch_id
from jobs.ledger import Finished, Ledger
from jobs.records import JobRecord, Manifest
from jobs.settings import Settings
from jobs.store import ObjectStore
from tests.chaos import leftovers
from worker import engine
from worker.control import Control
from worker.flusher import Done
from worker.held import Held
from worker.puller import Puller

REMEMBERED = 40


class Died(BaseException):
    """The process was killed here: no handler of the code under test may run on."""


@dataclass
class Steps:
    """Counts steps; at number `at` it calls `strike`."""

    at: int = -1
    strike: Callable[[], None] = lambda: None
    seen: list[str] = field(default_factory=list)
    watch: Callable[[], None] = lambda: None

    def take(self, name: str) -> None:
        self.seen.append(name)
        self.watch()
        if len(self.seen) - 1 == self.at:
            self.strike()


class Stepping:
    """Passes calls on to `inner`, a step before and a step after each."""

    def __init__(self, inner: Any, steps: Steps) -> None:
        self._inner, self._steps = inner, steps

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **named: Any) -> Any:
            self._steps.take(f"before {name}")
            answer = value(*args, **named)
            self._steps.take(f"after {name}")
            return answer

        return call

    @contextmanager
    def writer(self, key: str) -> Iterator[Any]:
        self._steps.take("before writer")
        with self._inner.writer(key) as out:
            yield out
            self._steps.take("before commit")
        self._steps.take("after commit")


class PlainFlusher:
    """A Flusher without threads: each request is a part of its own."""

    def __init__(self, ledger: Ledger, store: ObjectStore, held: Held, fingerprint: str) -> None:
        self._ledger, self._store, self._held, self._fingerprint = ledger, store, held, fingerprint

    def put(self, done: Done) -> None:
        request = done.lease.request
        part = results.Part(request.job_id)
        part.add(done.rows)
        part.write(self._store)
        rows = [Finished(request.id, done.lease.token, r.row, r.failed, *r.usage) for r in done.rows]
        self._ledger.complete(self._fingerprint, request.job_id, part.name, rows)
        self._held.drop([done.lease])

    def hurry(self) -> None:
        pass


class Lives:
    """A job, the process that works on it, and the next process when that one died."""

    def __init__(self, settings: Settings, store: ObjectStore, lines: list[bytes], steps: Steps) -> None:
        self.settings, self.plain_store, self.steps = settings, store, steps
        self.plain = Ledger.connect(settings)
        self.batches = Batches(store, self.plain)
        self.shown: list[schema.Batch] = []
        self.computed = 0
        self._snapshots: deque[list[tuple[bytes, int, bytes]]] = deque(maxlen=REMEMBERED)
        self._forgetful = False
        self.record = self._accept(lines)
        self._begin_life()

    def run(self, turns: int = 60) -> None:
        """Live until the job has ended and Redis holds nothing of it, dying as often as `strike` says."""
        for _ in range(turns):
            try:
                self.turn()
            except Died:
                self._begin_life()
            except (redis.RedisError, errors.LonghaulError):
                self._begin_life()  # the loops of a worker outlive it; its engine need not
            self.look()
            if self.ended and not self.left():
                return
            self.pass_time()
        raise AssertionError(
            f"not ended: {self.shown[-1]}, left: {self.left()}, steps: {self.steps.seen[-40:]}"
        )

    @property
    def ended(self) -> bool:
        return self.shown[-1].status in views.TERMINAL

    def look(self) -> schema.Batch:
        """Ask as a client does; what has ended must stay as it ended, once a restart of Redis is noticed."""
        batch = self.batches.get(self.record.tenant, self.record.id)
        noticed = self.plain.recovered_run() is not None or not self._forgetful
        if self.shown and self.ended and noticed:
            assert batch == self.shown[-1], f"it had ended, then changed: {self.shown[-1]} {batch}"
        self.shown.append(batch)
        return batch

    def left(self) -> list[str]:
        """Name what is in Redis or open in the store that would not be there were the job never made."""
        return leftovers.left(self.plain, self.plain_store, self.settings.namespace)

    def keys(self) -> list[bytes]:
        return leftovers.keys(self.plain, self.settings.namespace)

    def manifest(self) -> Manifest:
        return Manifest.from_json(self.plain_store.get(f"jobs/{self.record.id}/manifest.json"))

    def lines(self, kind: str) -> list[dict[str, Any]]:
        made = self.manifest().files.get(kind)
        return [orjson.loads(x) for x in self.plain_store.get(made["key"]).splitlines()] if made else []

    def close(self) -> None:
        self.lose_all()
        self.plain.close()

    # What may strike

    def die(self) -> None:
        raise Died

    def lose_all(self) -> None:
        """Redis loses its data."""
        self.plain.redis.delete(*self.keys(), "nothing")

    def lose_last(self, steps: int) -> None:
        """Redis is killed and restarts with what it had some steps ago, as an append-only file may lose."""
        then = self._snapshots[max(0, len(self._snapshots) - 1 - steps)]
        self.lose_all()
        self._forgetful = True
        for key, expiry, value in then:
            if not key.endswith((b":recovered", b":generation")):  # as with another run id
                self.plain.redis.restore(key, max(expiry, 0), value)

    def remember(self) -> None:
        """Note what Redis holds, for `lose_last`."""
        pipe = self.plain.redis.pipeline(transaction=False)
        keys = self.keys()
        for key in keys:
            pipe.pttl(key)
            pipe.dump(key)
        found = pipe.execute()
        self._snapshots.append(
            [(k, t, v) for k, t, v in zip(keys, found[::2], found[1::2], strict=True) if v is not None]
        )

    def cancel(self) -> None:
        self.batches.cancel(self.record.tenant, self.record.id)

    def expire(self) -> None:
        """Let the deadline pass now."""
        prefix = f"{{{self.settings.namespace}}}:"
        if self.plain.redis.exists(f"{prefix}job:{self.record.id}"):
            self.plain.redis.hset(f"{prefix}job:{self.record.id}", "expires_at", "1")
            self.plain.redis.zadd(f"{prefix}deadlines", {self.record.id: 1}, xx=True)

    def pass_time(self) -> None:
        """Let every lease and delay run out."""
        prefix = f"{{{self.settings.namespace}}}:"
        for name in ["later", *(f"leases:{m}" for m in self.settings.fingerprints.values())]:
            members: Any = self.plain.redis.zrange(prefix + name, 0, -1)
            if members:
                self.plain.redis.zadd(prefix + name, dict.fromkeys(members, 1))

    # A life

    def _begin_life(self) -> None:
        ledger: Any = Stepping(self.plain, self.steps)
        store: Any = Stepping(self.plain_store, self.steps)
        self.ledger, self.store = ledger, store
        self.control = Control(self.settings, ledger, store, lambda _: None)
        ((name, model),) = self.settings.models.items()
        fingerprint = self.settings.fingerprints[name]
        held = Held()
        flusher: Any = PlainFlusher(ledger, store, held, fingerprint)
        opened = engine.open_engine(name, model, self.settings)
        self.puller = Puller(opened, ledger, fingerprint, held, flusher, "w")

    def turn(self) -> None:
        """Do once what each loop of a worker does."""
        recover.recover(self.ledger, self.store)
        self.control.reap()
        while self.control.run_unit():
            self.look()
            if self.puller.turn():
                self.computed += 1
        while self.puller.turn():
            self.look()

    def _accept(self, lines: list[bytes]) -> JobRecord:
        job_id = batch_id()
        record = JobRecord(
            id=job_id,
            tenant="t",
            endpoint="/v1/chat/completions",
            input_file_id="file-x",
            input_key=f"files/{job_id}",
            completion_window="24h",
            created_at=made_at(job_id),
            expires_at=made_at(job_id) + 86_400,
        )
        self.plain_store.put(record.input_key, b"\n".join(lines))
        self.plain_store.put(f"jobs/{job_id}/job.json", record.to_json())
        self.plain_store.put(f"open/{job_id}", b"")
        self.plain.create(record)
        return record
