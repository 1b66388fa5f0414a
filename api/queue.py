"""The queue's depth, of the tenant who asks, and the workers. Scaling reads that of all in Redis."""

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.auth import Tenant
from api.context import Context, Deps
from jobs import standstill
from jobs.ledger_fleet import Present

router = APIRouter(prefix="/v1/queue", tags=["Queue"])


class ModelDepth(BaseModel):
    """What waits or runs for one model."""

    model: str
    fingerprint: str = Field(description="The exact model: name, source, revision, dtype.")
    queued: int
    leased: int
    depth: int = Field(description="queued + leased. Zero only when nothing is left to do.")
    workers: int = Field(description="Workers that run this model or load it; also those that take turns.")
    reason: str | None = Field(description="Why a worker that should run it could not load it.")
    waits: str | None = Field(description="Why its jobs that are in progress stand still; null: they do not.")
    buckets: dict[str, int] = Field(
        description="Queued requests by bucket, the longest prompt it takes (tokens)."
    )


class FailingUnit(BaseModel):
    """A step of a job that failed when it ran last, and is tried again."""

    batch: str
    unit: str = Field(description="plan, feed or finalize.")
    failures: int = Field(description="How often in a row.")
    reason: str
    waits: str = Field(description="The same as a sentence without its end.")


class Queue(BaseModel):
    """The depth of all that a tenant has."""

    object: str = "queue"
    models: list[ModelDepth]
    control: int = Field(description="Open units: steps of jobs (plan, feed, finalize) that are not done.")
    workers: int = Field(description="Workers of any model; each does open units, too.")
    failing: list[FailingUnit] = Field(description="Steps of your jobs that fail.")
    waits: str | None = Field(description="Why jobs that are checked or finalized stand still.")


@router.get("", summary="Depth of the queue")
def get_queue(tenant: Tenant, context: Deps) -> Queue:
    """Return what of yours is queued and running, per model and bucket, what your jobs have to do, and who is
    there to do it.
    """
    return of(context, tenant)


def of(context: Context, tenant: str) -> Queue:
    """Return the depth of all that a tenant has."""
    there = [
        one
        for one in context.ledger.fleet.present()
        if one.state in ("loading", "serving") and one.age_seconds <= context.settings.lease_seconds
    ]
    depth = context.ledger.tenants.depth(tenant)
    names = {fingerprint: name for name, fingerprint in context.settings.fingerprints.items()}
    models = []
    for fingerprint in sorted({*names, *depth.models}):
        found = depth.models.get(fingerprint)
        queued, leased, buckets = (
            (found["queued"], found["leased"], found["buckets"]) if found else (0, 0, {})
        )
        name = names.get(fingerprint, fingerprint.rpartition("@")[0])
        own = [one for one in there if one.may_run(fingerprint)]
        reason = next(filter(None, (one.unavailable.get(fingerprint) for one in there)), None)
        missing = standstill.missing(name, queued + leased, len(own), reason)
        models.append(
            ModelDepth(
                model=name,
                fingerprint=fingerprint,
                queued=queued,
                leased=leased,
                depth=queued + leased,
                workers=len(own),
                reason=reason,
                waits=_nobody(there) or missing or _loading(name, own),
                buckets={str(bucket): count for bucket, count in sorted(buckets.items()) if count},
            )
        )
    failing = [
        FailingUnit(
            batch=one.job_id,
            unit=one.kind,
            failures=one.failures,
            reason=one.reason,
            waits=standstill.fails(one.kind, one.failures, one.reason),
        )
        for one in depth.failing
    ]
    waits = _nobody(there) or _loading(None, there)
    return Queue(models=models, control=depth.control, workers=len(there), failing=failing, waits=waits)


def _nobody(there: list[Present]) -> str | None:
    return None if there else standstill.NOBODY


def _loading(model: str | None, own: list[Present]) -> str | None:
    return standstill.loads(model, {one.state for one in own})
