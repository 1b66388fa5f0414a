"""The ledger as plain Python: what each step must do and answer. Slow, small, obvious; held against Redis."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.ledger import Finished, State
from jobs.records import JobRecord, PlannedRequest

OPEN = (State.VALIDATING, State.IN_PROGRESS)
Place = tuple[int, str] | None
"""Where a request waits: a bucket of a tenant, or with the suspects."""


class Lost(Exception):
    """The step must raise LeaseLost."""


class Illegal(Exception):
    """The step must raise Conflict."""


@dataclass
class Request:
    """A request in Redis. `owner` is the token of its lease; without one it waits in a queue."""

    planned: PlannedRequest
    owner: str | None = None
    alone: bool = False
    running: bool = False
    attempts: int = 0
    kills: int = 0


@dataclass
class Job:
    record: JobRecord
    state: State = State.VALIDATING
    outcome: str | None = None
    fingerprint: str = ""
    total: int | None = None
    begun: str | None = None
    planned: bool = False
    shards: list[str] = field(default_factory=list)
    cursor: int = 0
    offset: int = 0
    fed: int = 0
    fed_call: tuple[object, ...] | None = None
    done: set[int] = field(default_factory=set)
    completed: int = 0
    failed: int = 0
    usage: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    parts: dict[str, list[int]] = field(default_factory=dict)
    live: dict[str, Request] = field(default_factory=dict)


class Model:
    """All jobs, units and queues. `units` maps "<kind>:<job>" to the token of its owner."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.units: dict[str, str | None] = {}
        self.queues: dict[tuple[str, int, str], list[str]] = defaultdict(list)
        self.suspects: dict[str, list[str]] = defaultdict(list)
        self.drainer: dict[str, str] = {}

    def request(self, rid: str, fingerprint: str) -> Request | None:
        job = self.jobs[rid.partition(":")[0]]
        return job.live.get(rid) if job.fingerprint == fingerprint else None

    # Jobs

    def create(self, record: JobRecord) -> bool:
        if record.id in self.jobs:
            return False
        self.jobs[record.id] = Job(record)
        self.units[f"plan:{record.id}"] = None
        return True

    def cancel(self, job_id: str) -> State:
        job = self.jobs[job_id]
        if job.state in OPEN:
            self._revoke(job)
            self._finalize(job, State.CANCELLING, "cancelled")
        return job.state

    def expire(self, job_id: str) -> bool:
        job = self.jobs[job_id]
        if job.state not in OPEN:
            return False
        self._revoke(job)
        self._finalize(job, State.FINALIZING, "expired")
        return True

    def finish(self, job_id: str, token: str, state: str) -> None:
        job = self.jobs[job_id]
        if job.state.terminal:
            return
        self._owned("finalize", job_id, token)
        job.state = State(state)
        self._close(job_id, "plan", "feed", "finalize")
        job.parts, job.done = {}, set()

    # Plan and feed

    def begin_plan(self, job_id: str, token: str, total: int, fingerprint: str) -> None:
        self._owned("plan", job_id, token)
        job = self.jobs[job_id]
        if job.begun == token:
            return
        if job.fingerprint != fingerprint:
            self._revoke(job)
        job.begun, job.total, job.fingerprint = token, total, fingerprint
        job.shards, job.cursor, job.offset = [], 0, 0

    def add_shards(self, job_id: str, token: str, shards: Sequence[str]) -> None:
        job = self._planning(job_id, token)
        new = [shard for shard in shards if shard not in job.shards]
        job.shards += new
        if new:
            job.state = State.IN_PROGRESS
            self.units.setdefault(f"feed:{job_id}", None)

    def end_plan(self, job_id: str, token: str) -> None:
        job = self.jobs[job_id]
        if job.planned and job.begun == token:
            return
        self._planning(job_id, token)
        job.state, job.planned = State.IN_PROGRESS, True
        self._close(job_id, "plan")
        self._settle(job)

    def fail(self, job_id: str, token: str) -> None:
        job = self.jobs[job_id]
        if job.state == State.FAILED:
            return
        self._owned("plan", job_id, token)
        if job.state != State.VALIDATING:
            raise Illegal
        job.state = State.FAILED
        self._close(job_id, "plan")
        job.parts, job.done = {}, set()

    def feed(
        self, job_id: str, token: str, shard: str, offset: int, requests: list[PlannedRequest], last: bool
    ) -> bool:
        job, call = self.jobs[job_id], (token, shard, offset, len(requests), last)
        if job.fed_call == call:
            return True
        self._owned("feed", job_id, token)
        at = job.shards[job.cursor] if job.cursor < len(job.shards) else None
        if (at, job.offset) != (shard, offset):
            return False
        for request in requests:
            if request.id not in job.live and not job.done.issuperset(request.rows):
                job.live[request.id] = Request(request)
                self.queues[job.fingerprint, request.bucket, job.record.tenant].append(request.id)
                job.fed += 1
        job.fed_call = call
        job.cursor, job.offset = (job.cursor + 1, 0) if last else (job.cursor, offset + len(requests))
        self._settle(job)
        return True

    # Requests

    def claim(
        self,
        worker: str,
        token: str,
        fingerprint: str,
        count: int,
        turns: Sequence[str],
        bucket: int | None,
        idle: bool,
    ) -> list[str]:
        """Lease requests; `bucket` is the one that the ledger must take from, of tenants in turn."""
        suspects = self.suspects[fingerprint]
        if suspects:
            if idle:
                taken = self._suspects(fingerprint, count)
                return self._lease(token, fingerprint, taken, alone=len(taken) == 1)
            if self.drainer.setdefault(fingerprint, worker) == worker:
                return []
        if bucket is None:
            return []
        taken = []
        for tenant in turns:
            queue = self.queues[fingerprint, bucket, tenant]
            some = queue[: count - len(taken)]
            del queue[: len(some)]
            taken += some
        return self._lease(token, fingerprint, taken, alone=False)

    def start(self, fingerprint: str, leases: Sequence[tuple[str, str]]) -> list[str]:
        lost = []
        for rid, token in leases:
            request = self.request(rid, fingerprint)
            if request and request.owner == token:
                request.running = True
            else:
                lost.append(rid)
        return lost

    def lost(self, fingerprint: str, leases: Sequence[tuple[str, str]]) -> list[str]:
        owners = ((rid, token, self.request(rid, fingerprint)) for rid, token in leases)
        return [rid for rid, token, request in owners if request is None or request.owner != token]

    def release(self, fingerprint: str, leases: Sequence[tuple[str, str]]) -> None:
        back: dict[Place, list[str]] = defaultdict(list)
        for rid, token in leases:
            request = self.request(rid, fingerprint)
            if request and request.owner == token and request.kills < 2:
                back[self._place(request)].append(rid)
                request.owner, request.running, request.alone = None, False, False
        for place, rids in back.items():
            self._waiting(fingerprint, place)[:0] = rids

    def complete(
        self, fingerprint: str | None, job_id: str, part: str, rows: Sequence[Finished]
    ) -> list[int]:
        job = self.jobs[job_id]
        if part in job.parts:
            return job.parts[part]
        if job.state.terminal:
            return [row.row for row in rows]
        model = job.fingerprint if fingerprint is None else fingerprint
        allowed = {row.rid: row.token is None or not self.lost(model, [(row.rid, row.token)]) for row in rows}
        refused = []
        for row in rows:
            if not allowed[row.rid] or row.row in job.done or row.row >= (job.total or 2**32):
                refused.append(row.row)
                continue
            job.done.add(row.row)
            job.completed += row.failed is False
            job.failed += row.failed is True
            counts = (row.prompt, row.cached, row.completion, row.reasoning)
            job.usage = [a + b for a, b in zip(job.usage, counts, strict=True)]
        for rid in (rid for rid, may in allowed.items() if may):
            self._forget(job, rid)
        if len(refused) < len(rows):
            job.parts[part] = refused
        self._settle(job)
        return refused

    def reap(self, fingerprint: str, token: str, expired: Sequence[str]) -> tuple[int, list[str]]:
        """Take back the leases in the order of their expiry."""
        back: dict[Place, list[str]] = defaultdict(list)
        given_up = []
        for rid in expired:
            request = self.request(rid, fingerprint)
            assert request is not None
            ran, alone = request.running, request.alone
            request.owner, request.running, request.alone = None, False, False
            request.attempts += ran
            request.kills += ran and alone
            if request.kills >= 2:
                request.owner = token
                given_up.append(rid)
            elif ran:
                self.suspects[fingerprint].append(rid)
            else:
                back[self._place(request)].append(rid)
        for place, rids in back.items():
            self._waiting(fingerprint, place)[:0] = rids
        return len(expired) - len(given_up), given_up

    # What steps share

    def _suspects(self, fingerprint: str, count: int) -> list[str]:
        """Take the first suspect and those like it that follow: fewer, the more workers died of them."""
        waiting = self.suspects[fingerprint]
        requests = [self.request(rid, fingerprint) for rid in waiting]
        alike = [request and (request.attempts, request.planned.bucket) for request in requests]
        together = next((place for place, which in enumerate(alike) if which != alike[0]), len(alike))
        most = {1: count, 2: count // 8 if len(waiting) > count // 8 else 1}.get(
            alike[0][0] if alike[0] else 0, 1
        )
        taken = waiting[: max(1, min(together, most))]
        del waiting[: len(taken)]
        return taken

    def _place(self, request: Request) -> Place:
        tenant = self.jobs[request.planned.job_id].record.tenant
        return None if request.attempts else (request.planned.bucket, tenant)

    def _waiting(self, fingerprint: str, place: Place) -> list[str]:
        return self.suspects[fingerprint] if place is None else self.queues[fingerprint, *place]

    def _lease(self, token: str, fingerprint: str, rids: list[str], alone: bool) -> list[str]:
        for rid in rids:
            request = self.request(rid, fingerprint)
            assert request is not None
            request.owner, request.alone = token, alone
        return rids

    def _forget(self, job: Job, rid: str) -> None:
        if job.live.pop(rid, None) is None:
            return
        for waiting in [*self.queues.values(), *self.suspects.values()]:
            if rid in waiting:
                waiting.remove(rid)

    def _revoke(self, job: Job) -> None:
        for rid in list(job.live):
            self._forget(job, rid)

    def _owned(self, kind: str, job_id: str, token: str) -> None:
        if self.units.get(f"{kind}:{job_id}") != token:
            raise Lost

    def _planning(self, job_id: str, token: str) -> Job:
        self._owned("plan", job_id, token)
        if self.jobs[job_id].begun != token:
            raise Lost
        return self.jobs[job_id]

    def _close(self, job_id: str, *kinds: str) -> None:
        for kind in kinds:
            self.units.pop(f"{kind}:{job_id}", None)

    def _finalize(self, job: Job, state: State, outcome: str) -> None:
        job.state, job.outcome = state, outcome
        self._close(job.record.id, "plan", "feed")
        self.units[f"finalize:{job.record.id}"] = None

    def _settle(self, job: Job) -> None:
        if job.state != State.IN_PROGRESS or not job.planned or job.cursor < len(job.shards):
            return
        self._close(job.record.id, "feed")
        if not job.live:
            self._finalize(job, State.FINALIZING, "completed")
