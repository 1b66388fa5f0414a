"""The queue's depth, of the tenant who asks. Scaling reads that of all in Redis."""

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.auth import Tenant
from api.context import Deps

router = APIRouter(prefix="/v1/queue", tags=["Queue"])


class ModelDepth(BaseModel):
    """What waits or runs for one model."""

    model: str
    fingerprint: str = Field(description="The exact model: name, source, revision, dtype.")
    queued: int
    leased: int
    depth: int = Field(description="queued + leased. Zero only when nothing is left to do.")
    buckets: dict[str, int] = Field(
        description="Queued requests by bucket, the longest prompt it takes (tokens)."
    )


class Queue(BaseModel):
    """The depth of all that a tenant has."""

    object: str = "queue"
    models: list[ModelDepth]
    control: int = Field(description="Open units: steps of jobs (plan, feed, finalize) that are not done.")


@router.get("", summary="Depth of the queue")
def get_queue(tenant: Tenant, context: Deps) -> Queue:
    """Return what of yours is queued and running, per model and bucket, and what your jobs have to do."""
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
                buckets={str(bucket): count for bucket, count in sorted(buckets.items()) if count},
            )
        )
    return Queue(models=models, control=depth.control)
