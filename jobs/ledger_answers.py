"""What Redis answers, as the ledger's values."""

from collections.abc import Sequence
from typing import Any

from jobs import records
from jobs.buckets import BOUNDS
from jobs.ledger_types import Failing, Job, Lease, ModelDepth, State
from jobs.records import PlannedRequest

TIMES = (
    "created_at",
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


TOKENS = ("prompt", "cached", "completion", "reasoning")
"""The fields of a job's usage, in the order of records.Usage."""


def text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def job(fields: Sequence[bytes], live: int) -> Job | None:
    """Return the job of a hash's names and values, in turn."""
    values = [text(item) for item in fields]
    known = dict(zip(values[::2], values[1::2], strict=True))
    if not known:
        return None
    return Job(
        id=known["id"],
        state=State(known["state"]),
        outcome=known.get("outcome"),
        tenant=known["tenant"],
        model=known.get("model"),
        fingerprint=known.get("fingerprint"),
        total=int(known.get("total", 0)),
        completed=int(known.get("completed", 0)),
        failed=int(known.get("failed", 0)),
        usage=records.usage_of([int(known.get(name, 0)) for name in TOKENS]),
        times={name: float(known[name]) for name in TIMES if name in known},
        expires_at=float(known["expires_at"]),
        priority=int(known["priority"]),
        planned=known.get("planned") == "1",
        fed=int(known.get("fed", 0)),
        live=live,
    )


def leases(fingerprint: str, token: str, answer: list[Any]) -> list[Lease]:
    _, _, epoch, enqueued, attempts, payloads, _ = answer
    return [
        Lease(
            PlannedRequest.from_json(payload), token, fingerprint, int(epoch), int(tries), int(since) / 1000
        )
        for since, tries, payload in zip(enqueued, attempts, payloads, strict=True)
    ]


def failing(unit: str, told: bytes) -> Failing:
    """Return what `unit_failures` tells of a unit."""
    kind, _, job_id = unit.partition(":")
    failures, _, reason = text(told).partition("|")
    return Failing(job_id, kind, int(failures), reason)


def depth(counts: Sequence[int]) -> ModelDepth:
    requests, leased, suspects, _, *queues = counts
    return ModelDepth(
        queued=requests - leased,
        leased=leased,
        suspects=suspects,
        buckets={bound: count for bound, count in zip(BOUNDS, queues, strict=True) if count},
    )
