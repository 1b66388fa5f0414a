"""What is served, whether this process lives, whether it can work, and its Prometheus metrics."""

import time
from threading import Lock
from typing import Literal

import redis
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from api.auth import Tenant
from api.context import Context, Deps
from jobs import errors

router = APIRouter()
FRESH_SECONDS = 1.0
"""How long an answer of /readyz is given again: probes are many, and a store that hangs takes its time."""


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "longhaul"


class Models(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """A probe's answer."""

    status: str


class Readiness:
    """Whether Redis and the store answer, asked at most once a second, by one who asks for all."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = Lock()
        self._until = 0.0
        self._error: Exception | None = None

    def check(self) -> None:
        """Raise what they raise."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._error = self._asked()
                self._until = time.monotonic() + FRESH_SECONDS
            if self._error is not None:
                raise self._error.with_traceback(None)

    def _asked(self) -> Exception | None:
        try:
            self._context.ledger.ping()
            self._context.store.check()
        except (redis.RedisError, errors.LonghaulError) as error:
            return error
        return None


@router.get("/v1/models", tags=["Models"], summary="List models")
def list_models(tenant: Tenant, context: Deps) -> Models:
    """Return the models that this deployment serves, whether or not a worker runs at the moment."""
    return Models(data=[_model(name) for name in context.settings.models])


@router.get("/v1/models/{model:path}", tags=["Models"], summary="Look at a model")
def get_model(tenant: Tenant, context: Deps, model: str) -> Model:
    """Return one served model."""
    if model not in context.settings.models:
        error = errors.NotFound(what="model", id=model[:200], param="model")
        error.code = "model_not_found"
        raise error
    return _model(model)


@router.get("/healthz", tags=["Status"], summary="Is the process alive?")
async def healthz() -> Health:
    """Answer as long as this process does, whatever the state of Redis and the store."""
    return Health(status="ok")


@router.get("/readyz", tags=["Status"], summary="Can it take requests?")
def readyz(request: Request) -> Health:
    """Answer 200 if Redis and the store answer, else 503."""
    request.app.state.readiness.check()
    return Health(status="ready")


@router.get("/metrics", tags=["Status"], summary="Prometheus metrics", response_class=Response)
def metrics(request: Request) -> Response:
    """Return the metrics of this process and the depth of the queue in Prometheus' text format."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)


def _model(name: str) -> Model:
    return Model(id=name, created=0)
