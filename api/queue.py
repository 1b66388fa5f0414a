"""The queue's depth, of the tenant who asks, and the workers. Scaling reads that of all in Redis."""

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.auth import Tenant
from api.context import Context, Deps

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
    buckets: dict[str, int] = Field(
        description="Queued requests by bucket, the longest prompt it takes (tokens)."
    )


class FailingUnit(BaseModel):
    """A step of a job that failed when it ran last, and is tried again."""

    batch: str
    unit: str = Field(description="plan, feed or finalize.")
    failures: int = Field(description="How often in a row.")
    reason: str


class Queue(BaseModel):
    """The depth of all that a tenant has."""

    object: str = "queue"
    models: list[ModelDepth]
    control: int = Field(description="Open units: steps of jobs (plan, feed, finalize) that are not done.")
    workers: int = Field(description="Workers of any model; each does open units, too.")
    failing: list[FailingUnit] = Field(description="Steps of your jobs that fail.")


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
        models.append(
            ModelDepth(
                model=names.get(fingerprint, fingerprint.rpartition("@")[0]),
                fingerprint=fingerprint,
                queued=queued,
                leased=leased,
                depth=queued + leased,
                workers=sum(one.may_run(fingerprint) for one in there),
                reason=next(filter(None, (one.unavailable.get(fingerprint) for one in there)), None),
                buckets={str(bucket): count for bucket, count in sorted(buckets.items()) if count},
            )
        )
    failing = [
        FailingUnit(batch=one.job_id, unit=one.kind, failures=one.failures, reason=one.reason)
        for one in depth.failing
    ]
    return Queue(models=models, control=depth.control, workers=len(there), failing=failing)
