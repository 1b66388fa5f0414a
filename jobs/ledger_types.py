"""The values that the ledger takes and gives: jobs, units, leases, groups, finished rows."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict

from jobs.records import PlannedRequest, Usage

UNITS = ("finalize", "feed", "plan")
"""The kinds of units. In this order, where their turns are equal."""


class State(StrEnum):
    """Where a job is. One past its deadline is FINALIZING, outcome `expired`, until its files lie there."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self in (State.COMPLETED, State.FAILED, State.CANCELLED, State.EXPIRED)


@dataclass(frozen=True)
class Job:
    """A job as Redis knows it. `times` holds the stamps it has (`created_at`, ...) in unix seconds.

    `total` is 0 until the plan has counted. `planned`: every shard is released. `fed` counts the requests put
    into Redis so far, `live` those queued or leased now. `usage` is of what has finished.
    """

    id: str
    state: State
    outcome: str | None
    tenant: str
    model: str | None
    fingerprint: str | None
    total: int
    completed: int
    failed: int
    usage: Usage
    times: dict[str, float]
    expires_at: float
    priority: int
    planned: bool
    fed: int
    live: int


@dataclass(frozen=True)
class Unit:
    """A leased step of a job. `epoch` goes into the names of what its owner writes: it only ever grows.

    `attempts` counts the claims since the last release: more than one means that an owner vanished.
    """

    kind: str
    job_id: str
    token: str
    epoch: int
    attempts: int = 1


@dataclass(frozen=True)
class Lease:
    """A worker's right to run a request. `enqueued` in unix seconds; `attempts`: workers that died of it."""

    request: PlannedRequest
    token: str
    fingerprint: str
    epoch: int
    attempts: int
    enqueued: float

    @property
    def rid(self) -> str:
        return self.request.id


@dataclass(frozen=True)
class Group:
    """What one claim gives. `alone`: suspects; run nothing beside them, claim nothing until they are done."""

    bucket: int
    leases: list[Lease]
    alone: bool
    epoch: int


@dataclass(frozen=True)
class Finished:
    """A finished row. A follower has its leader's `rid` and `token`.

    `token` is None for a row that no lease stands behind (refused by the plan, recovered from a part).
    `failed` is None for one that never ran (cancelled, expired): it counts as neither.
    """

    rid: str
    token: str | None
    row: int
    failed: bool | None
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True)
class FeedState:
    """What to feed next: `shard` (None: none released yet) from its request number `offset` on.

    A request longer than `room_bytes` may still be fed when `room_bytes` is not 0.
    """

    shard: str | None
    offset: int
    room_requests: int
    room_bytes: int
    planned: bool


@dataclass(frozen=True)
class Reaped:
    """What a reap did: leases put back, and requests given up, which the caller holds and must complete."""

    requeued: int = 0
    given_up: list[Lease] = field(default_factory=list)
    expired: dict[str, int] = field(default_factory=dict)
    """fingerprint -> leases that had run out, of both kinds."""


class ModelDepth(TypedDict):
    """Requests of one model. `buckets` and `suspects` (pulled alone) make up `queued`."""

    queued: int
    leased: int
    suspects: int
    buckets: dict[int, int]


@dataclass(frozen=True)
class Failing:
    """A unit of a job that failed when it ran last, `failures` times in a row, and is tried again."""

    job_id: str
    kind: str
    failures: int
    reason: str


@dataclass(frozen=True)
class Depth:
    """What is left to do: requests by model fingerprint, open units, and bytes of prompts in Redis.

    `fed_bytes` is 0 in that of one tenant; `failing` is empty in that of all.
    """

    models: dict[str, ModelDepth]
    control: int
    fed_bytes: int = 0
    failing: tuple[Failing, ...] = ()
