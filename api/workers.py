"""The workers that are there, as they last said: whoever has a key sees them all, and nothing of a tenant."""

from importlib import metadata
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.auth import Tenant
from api.context import Context, Deps
from jobs.ledger_fleet import Present
from jobs.metrics.families import model_of

router = APIRouter(prefix="/v1/workers", tags=["Queue"])


class Worker(BaseModel):
    """One worker, as it was `age_seconds` ago."""

    id: str
    object: Literal["worker"] = "worker"
    model: str | None = Field(description="What it has loaded, or loads; null: it plans and ends jobs only.")
    models: list[str] = Field(description="What it can swap between.")
    state: str = Field(description="loading, serving, retiring or draining.")
    running: int = Field(description="Requests in the running batch.")
    capacity: int = Field(description="Most requests at once.")
    held: int = Field(description="Requests leased to it.")
    units: int = Field(description="Steps of jobs (plan, feed, finalize) that it does.")
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    prefix_hit_ratio: float | None = Field(description="Of prompt tokens since it loaded, what was shared.")
    kv_usage_ratio: float | None = Field(description="Of the room for KV, what is in use.")
    idle_seconds: float
    age_seconds: float
    version: str | None


class Workers(BaseModel):
    """All workers that reported within the last minute."""

    object: Literal["list"] = "list"
    api_version: str
    data: list[Worker]


@router.get("", summary="List workers")
def list_workers(tenant: Tenant, context: Deps) -> Workers:
    """Return the workers that are there, what they run and how fast."""
    return of(context)


def of(context: Context) -> Workers:
    """Return the workers of all models, by name."""
    present = sorted(context.ledger.fleet.present(), key=lambda one: one.name)
    return Workers(api_version=metadata.version("longhaul"), data=[_worker(context, one) for one in present])


def _worker(context: Context, present: Present) -> Worker:
    names = {fingerprint: name for name, fingerprint in context.settings.fingerprints.items()}

    def named(fingerprint: str) -> str:
        return names.get(fingerprint) or model_of(fingerprint)

    same = {name: getattr(present, name) for name in Worker.model_fields if hasattr(present, name)}
    same["model"] = named(present.model) if present.model else None
    same["models"] = [named(one) for one in present.models or filter(None, [present.model])]
    return Worker(id=present.name, **same)
