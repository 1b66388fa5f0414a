"""The app: routers, error shapes, documentation, and a start that fails with one line."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from api import (
    batches,
    events,
    files,
    limits,
    metrics,
    page,
    profiles,
    queue,
    results,
    status,
    upload,
    workers,
)
from api import errors as shapes
from api.changes import Changes
from api.context import Context
from api.reaper import Reaper
from jobs import errors, log
from jobs.settings import Settings

logger = logging.getLogger(__name__)

DESCRIPTION = """
Batch LLM inference on your own GPUs, by the OpenAI Files and Batches contract: the `openai` client works
unchanged.

1. `POST /v1/files` uploads a JSONL file of requests (`purpose=batch`).
2. `POST /v1/batches` makes a batch of it. Or give `requests` inline.
3. `GET /v1/batches/{id}` tells how far it is; `GET /v1/batches/{id}/results` streams lines while it runs.
4. `GET /v1/files/{output_file_id}/content` is the result, in the order of the input.

Every error has one shape: `{"error": {"message", "type", "param", "code"}}`.
"""
ROUTERS = (
    files.router,
    batches.router,
    results.router,
    profiles.router,
    queue.router,
    workers.router,
    events.router,
    status.router,
    page.router,
)


def create_app(settings: Settings, context: Context | None = None) -> FastAPI:
    """Return the API of these settings; raise StoreUnreachable or RedisUnreachable if it could not serve."""
    context = context or Context.connect(settings)
    reaper, changes = Reaper(context), Changes(context)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper.start()
        yield
        changes.stop()
        await asyncio.to_thread(reaper.stop)
        context.close()

    app = FastAPI(
        title="Longhaul",
        description=DESCRIPTION,
        version="1",
        lifespan=lifespan,
        redirect_slashes=False,
        responses=shapes.RESPONSES,
    )
    app.state.context = context
    app.state.large_bodies = asyncio.Semaphore(upload.LARGE_AT_ONCE)
    app.state.changes = changes
    app.state.profiles = profiles.Profiles(context.store)
    app.state.readiness = status.Readiness(context)
    app.state.registry = metrics.registry(context.ledger, settings)
    app.add_middleware(limits.Limits)
    app.add_middleware(metrics.Requests, registry=app.state.registry)
    shapes.install(app)
    for router in ROUTERS:
        app.include_router(router)
    generated = app.openapi
    app.openapi = lambda: _documented(generated())  # type: ignore[method-assign]
    return app


class LazyApp:
    """The app, made from the environment when the server starts: importing this module needs nothing."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; a start that fails tells the server why in one line, and the server exits with an error."""
        if self._app is None:
            try:
                self._app = await asyncio.to_thread(_from_environment)
            except errors.LonghaulError as error:
                if scope["type"] != "lifespan":
                    raise
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
        await self._app(scope, receive, send)


def _from_environment() -> FastAPI:
    log.setup()
    settings = Settings.load()
    log.setup(format=settings.log_format)
    return start(settings)


def start(settings: Settings) -> FastAPI:
    """Return the app, and log the settings it has, secrets masked."""
    app = create_app(settings)
    logger.info("settings", extra={"settings": settings.shown()})
    return app


def _documented(spec: dict[str, Any]) -> dict[str, Any]:
    """Take out the framework's own 422, which is never answered; put in the bodies that are read by hand."""
    for path in spec["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    schemas = spec.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name, made in batches.SCHEMAS.items():
        made = dict(made)
        schemas.update(made.pop("$defs", {}))
        schemas[name] = made
    return spec


app = LazyApp()
