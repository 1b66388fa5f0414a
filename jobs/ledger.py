"""The ledger: jobs, units, requests and leases in Redis. Each step is one script, and may be repeated."""

import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import redis

from jobs import ledger_answers as answers
from jobs import ledger_scripts
from jobs.buckets import BOUNDS
from jobs.ledger_feeding import Feeding
from jobs.ledger_fleet import Fleet
from jobs.ledger_scripts import Argument
from jobs.ledger_tenants import Tenants
from jobs.ledger_types import (
    UNITS,
    Depth,
    Finished,
    Group,
    Job,
    Lease,
    Reaped,
    State,
    Unit,
)
from jobs.records import JobRecord, Manifest, PartEntry
from jobs.settings import Settings

log = logging.getLogger(__name__)

__all__ = [
    "Finished",
    "Group",
    "Job",
    "Lease",
    "Ledger",
    "State",
    "Unit",
]

_REASON_CHARACTERS = 500
_REMEMBER_MS = 60_000
_REAP_AT_ONCE = 1000
_PATIENCE_MS = 10_000


class Ledger(Feeding):
    """The ledger of one namespace. Safe to share between threads.

    A call that finds no Redis raises redis.exceptions.ConnectionError or TimeoutError after a few tries.
    Calling again is always right: every step may be repeated.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        lease_seconds: float,
        *,
        grace_seconds: float | None = None,
        feed_window_requests: int = 4096,
        feed_budget_bytes: int = 256_000_000,
        finished_job_seconds: float = 3600,
    ) -> None:
        self.redis = client
        self.worker = uuid.uuid4().hex
        self._keys = ledger_scripts.Keys(namespace)
        self._scripts = ledger_scripts.Scripts(client)
        self.tenants = Tenants(client, self._keys, self._scripts)
        self.fleet = Fleet(client, self._keys, self._scripts)
        self._lease_ms = int(lease_seconds * 1000)
        self._grace_ms = int((lease_seconds / 3 if grace_seconds is None else grace_seconds) * 1000)
        # A shorter outage cannot have run a lease out, because heartbeats come several times a lease.
        self._gap_ms = max(self._lease_ms // 2, 5000)
        self._window = feed_window_requests
        self._budget = feed_budget_bytes
        self._finished_seconds = max(1, int(finished_job_seconds))

    @classmethod
    def connect(cls, settings: Settings, timeout_seconds: float = 5) -> Self:
        """Connect and ping; raises RedisUnreachable. A call fails after a few times `timeout_seconds`."""
        return cls(
            ledger_scripts.connect(settings.redis_url, timeout_seconds),
            settings.namespace,
            settings.lease_seconds,
            grace_seconds=2 * settings.heartbeat_seconds,
            feed_window_requests=settings.feed_window_requests,
            feed_budget_bytes=settings.feed_budget_bytes,
            finished_job_seconds=settings.finished_job_seconds,
        )

    def ping(self) -> None:
        """Raise redis.exceptions.RedisError when Redis does not answer."""
        self.redis.ping()

    def close(self) -> None:
        self.redis.close()

    def redis_run(self) -> str:
        """Return the id of this run of Redis: another after each restart, and after a loss of all without
        one.
        """
        info: Any = self.redis.info("server")
        name = self._keys.name("generation")
        try:
            self.redis.set(name, uuid.uuid4().hex, nx=True)
        except redis.OutOfMemoryError:  # a full Redis takes nothing new: it stays as it is
            log.warning("Redis is full: a loss of all its data may go unnoticed")
        kept: Any = self.redis.get(name)
        return f"{info['run_id']}:{answers.text(kept) if kept else ''}"

    def recovered_run(self) -> str | None:
        """Return the run of Redis after whose start jobs were recovered last; None after a loss of all."""
        run: Any = self.redis.get(self._keys.name("recovered"))
        return answers.text(run) if run else None

    def note_recovered(self, run: str) -> None:
        """Note that jobs were recovered in this run of Redis."""
        self.redis.set(self._keys.name("recovered"), run)

    # Jobs

    def create(self, record: JobRecord) -> bool:
        """Enter a job in `validating` with its plan unit; False when it is there already."""
        return self._create(record, uuid.uuid4().hex, lease_ms=0) > 0

    def recover(self, record: JobRecord) -> Unit | None:
        """Enter a job that Redis lost, its plan unit leased to the caller; None when it is there.

        The caller completes the rows of its parts (with no token), extends the unit, then releases it. Until
        then the job neither expires nor finalizes. A unit lost meanwhile (cancelled) is no reason to stop.
        """
        token = uuid.uuid4().hex
        epoch = self._create(record, token, self._lease_ms)
        return Unit("plan", record.id, token, epoch) if epoch else None

    def job(self, job_id: str) -> Job | None:
        """Return the job; None when Redis does not know it (never did, forgot it after its end, lost it)."""
        return self.jobs([job_id])[0]

    def jobs(self, job_ids: Sequence[str]) -> list[Job | None]:
        """Return the jobs in the order asked for."""
        asked = []
        for job_id in job_ids:
            asked.append(("HGETALL", self._keys.name("job", job_id)))
            asked.append(("SCARD", self._keys.name("live", job_id)))
        found = self._scripts.look(asked)
        return [answers.job(fields, live) for fields, live in zip(found[::2], found[1::2], strict=True)]

    def unfinished(self) -> list[str]:
        """Return the ids of the jobs with an open unit or a deadline ahead: all that have not ended."""
        units: Any = self.redis.hkeys(self._keys.name("control"))
        due: Any = self.redis.zrange(self._keys.name("deadlines"), 0, -1)
        return sorted({answers.text(unit).partition(":")[2] for unit in units} | set(map(answers.text, due)))

    def cancel(self, job_id: str) -> State | None:
        """Cancel an unfinished job: nothing of it completes any more. Returns its state; None: unknown."""
        state = self._on_model("cancel", job_id)
        return State(answers.text(state)) if state else None

    def expire_due(self) -> list[str]:
        """Move jobs past their deadline to FINALIZING with the outcome `expired`; returns their ids."""
        expired = []
        due = self._scripts.run("due_jobs", self._keys.of())
        for job_id in map(answers.text, due):
            if self._on_model("expire", job_id):
                expired.append(job_id)
        return expired

    def done(self, job_id: str) -> bytes:
        """Return the bitmap of finished rows: row r is bit 7 - r % 8 of byte r // 8."""
        bitmap: Any = self.redis.get(self._keys.name("done", job_id))
        return bitmap or b""

    # Units

    def claim_unit(
        self,
        kind: str | None = None,
        job_id: str | None = None,
        *,
        besides: str | None = None,
        unlike: Iterable[str] = (),
        token: str | None = None,
    ) -> Unit | None:
        """Lease a due unit; None when there is none. `besides`: any kind but this.

        `unlike`: no plan of a tenant whose jobs these are.

        Tenants take turns. Of a tenant's units: the highest priority, then the earliest deadline.
        """
        token = token or uuid.uuid4().hex
        kinds = ",".join([kind] if kind else [each for each in UNITS if each != besides])
        args = (job_id or "", token, kinds, self._lease_ms, _REMEMBER_MS)
        answer = self._scripts.run("claim_unit", self._keys.of(token=token), *args, *unlike)
        if answer is None:
            return None
        kind, _, owner = answers.text(answer[0]).partition(":")
        return Unit(kind, owner, token, int(answer[1]), int(answer[2]))

    def extend_unit(self, unit: Unit) -> bool:
        """Extend the lease; False when it is lost."""
        args = (unit.job_id, unit.kind, unit.token, self._lease_ms)
        return bool(self._scripts.run("extend_unit", self._keys.of(), *args))

    def release_unit(self, unit: Unit, delay_seconds: float = 0.0, reason: str = "") -> int:
        """Give a unit back, due again after the delay. One that is lost or closed stays as it is.

        `reason`: why it failed; returns how often in a row it has.
        """
        args = (unit.job_id, unit.kind, unit.token, int(delay_seconds * 1000), _told(reason))
        return int(self._scripts.run("release_unit", self._keys.of(job=unit.job_id), *args))

    # Jobs that end

    def fail(self, unit: Unit, manifest: Manifest | None = None) -> None:
        """Move validating -> failed with the manifest's times; raises LeaseLost, Conflict once work began."""
        args = (unit.token, self._finished_seconds, *_flat(manifest.times if manifest else {}))
        self._scripts.run("fail", self._keys.of(job=unit.job_id), unit.job_id, *args)

    # Requests

    def claim(
        self,
        fingerprint: str,
        count: int,
        prefer: int | None = None,
        idle: bool = False,
        *,
        token: str | None = None,
    ) -> Group | None:
        """Lease up to `count` requests of one bucket, of the tenant that was given least before all others.

        The bucket is `prefer`, unless another of that tenant waits far longer. Suspects go to callers that
        run nothing (`idle`), apart from others: up to `count` whose worker died once, an eighth as many if
        two did, the rest one by one. While some wait, one busy worker gets nothing, so that it becomes idle.
        """
        if count < 1:
            return None
        token = token or uuid.uuid4().hex
        keys = self._keys.of(model=fingerprint, token=token)
        wanted: tuple[Argument, ...] = (self.worker, token, count, prefer or "", int(idle))
        answer = self._scripts.run("claim", keys, *wanted, self._lease_ms, _REMEMBER_MS, _PATIENCE_MS)
        leases = answers.leases(fingerprint, token, answer)
        if not leases:
            return None
        return Group(leases[0].request.bucket, leases, bool(answer[1]), int(answer[2]))

    def start(self, fingerprint: str, leases: Iterable[Lease]) -> list[str]:
        """Mark requests as running, before they run; returns the ids that are lost and must not run."""
        return self._for_owned("start", fingerprint, leases, "")

    def extend(self, fingerprint: str, leases: Iterable[Lease]) -> list[str]:
        """Extend leases; returns the ids of those that are lost (reaped, cancelled, expired)."""
        return self._for_owned("extend", fingerprint, leases, self._lease_ms)

    def release(self, fingerprint: str, leases: Iterable[Lease]) -> None:
        """Put requests back at the head of their bucket; no attempt is counted."""
        self._for_owned("release", fingerprint, leases, "")

    def complete(
        self, fingerprint: str | None, job_id: str, part: str, rows: Sequence[Finished]
    ) -> list[int]:
        """Register a part that lies in the store and count its rows; returns the rows refused.

        A row is accepted once, and only from the owner of its request's lease, or without a token. All rows
        of a request (leader and followers) come in one call: it leaves Redis with them.
        """
        args: list[Argument] = []
        for row in rows:
            failed = "" if row.failed is None else int(row.failed)
            args += [row.rid, row.token or "", row.row, failed]
            args += [row.prompt, row.cached, row.completion, row.reasoning]
        answer = self._on_model("complete", job_id, part, self._window, *args, fingerprint=fingerprint)
        return list(map(int, answer))

    def reap(self, fingerprints: Iterable[str] | None = None) -> Reaped:
        """Take back expired leases, of all known models by default.

        Waiting requests return to the head of their bucket. Those that ran become suspects. One that ended
        two workers while alone is leased to the caller, who writes its error line and completes it.
        """
        if fingerprints is None:
            fingerprints = map(answers.text, self.redis.smembers(self._keys.name("models")))
        requeued, given_up, expired = 0, [], Counter[str]()
        for fingerprint in fingerprints:
            more = True
            while more:
                token = uuid.uuid4().hex
                keys = self._keys.of(model=fingerprint, token=token)
                args = (token, self._lease_ms, self._gap_ms, self._grace_ms, _REMEMBER_MS, _REAP_AT_ONCE)
                answer = self._scripts.run("reap", keys, "", *args)
                leases = answers.leases(fingerprint, token, answer)
                requeued += int(answer[6])
                given_up += leases
                expired[fingerprint] += int(answer[6]) + len(leases)
                more = int(answer[6]) + len(leases) == _REAP_AT_ONCE
        return Reaped(requeued, given_up, +expired)

    def parts(self, job_id: str, start: int = 0) -> list[PartEntry]:
        """Return the parts in the order of registration, from number `start` on; none once the job ended."""
        entries: Any = self.redis.lrange(self._keys.name("parts", job_id), start, -1)
        return [PartEntry.from_json(entry) for entry in entries]

    # Finalize

    def finish(self, unit: Unit, manifest: Manifest) -> None:
        """End the job as its manifest says and drop its requests; raises LeaseLost."""
        self._finish(unit.token, manifest)

    def end(self, manifest: Manifest) -> None:
        """End a job whose manifest lies in the store, whatever Redis believes: it may have lost the end."""
        self._finish("", manifest)

    def _finish(self, token: str, manifest: Manifest) -> None:
        facts: dict[str, Argument] = {
            **manifest.times,
            "total": manifest.total,
            "completed": manifest.completed,
            "failed": manifest.failed,
            **dict(zip(answers.TOKENS, manifest.usage, strict=True)),
        }
        args = (token, manifest.state, self._finished_seconds, *_flat(facts))
        self._on_model("finish", manifest.job_id, *args)

    # Depth

    def depth(self) -> Depth:
        """Return what is left to do."""
        names = sorted(map(answers.text, self.redis.smembers(self._keys.name("models"))))
        asked = [("HLEN", self._keys.name("control")), ("GET", self._keys.name("fed_bytes"))]
        for name in names:
            for command, kind in (("HLEN", "requests"), ("ZCARD", "leases"), ("LLEN", "suspects")):
                asked.append((command, self._keys.name(kind, name)))
            asked.append(("TENANTS", self._keys.name("turns", name)))
            asked += [("QUEUED", self._keys.name("queue", name, bound)) for bound in BOUNDS]
        control, fed_bytes, *counts = self._scripts.look(asked)
        width = 4 + len(BOUNDS)
        models = {name: answers.depth(counts[i * width : (i + 1) * width]) for i, name in enumerate(names)}
        return Depth(models, control, int(fed_bytes or 0))

    def _create(self, record: JobRecord, token: str, lease_ms: int) -> int:
        priority = max(-100, min(100, record.priority))
        # One number orders units: a step of priority outweighs every deadline.
        rank = int(record.expires_at * 1000) - priority * 10**13
        times = (record.created_at, record.expires_at)
        args = (record.id, record.tenant, record.priority, *times, rank, token, lease_ms)
        return int(self._scripts.run("create", self._keys.of(job=record.id), *args))

    def _for_owned(
        self, script: str, fingerprint: str, leases: Iterable[Lease], first: Argument
    ) -> list[str]:
        args = [item for lease in leases for item in (lease.rid, lease.token)]
        if not args:
            return []
        gone = self._scripts.run(script, self._keys.of(model=fingerprint), first, *args)
        return list(map(answers.text, gone))


def _told(reason: str) -> bytes:
    return reason[:_REASON_CHARACTERS].encode(errors="backslashreplace")


def _flat(fields: Mapping[str, Argument]) -> list[Argument]:
    return [item for pair in fields.items() for item in pair]
