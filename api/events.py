"""Server-sent events: what changes of a tenant's batches, of the queue and of the workers."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api import auth, protocol
from api.auth import Tenant
from api.changes import Changes
from api.context import Deps
from jobs import errors

router = APIRouter(prefix="/v1/events", tags=["Queue"])
HEARTBEAT_SECONDS = 15.0
_ID = re.compile(r"([0-9a-z]{26})\.([0-9]{1,15})", re.ASCII)
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.get(
    "",
    summary="Stream what changes",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def get_events(
    request: Request,
    tenant: Tenant,
    context: Deps,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(auth.bearer)],
    last_event_id: Annotated[str | None, Header(description="The id of the last event: go on there.")] = None,
) -> StreamingResponse:
    """Stream `batch`, `gone`, `queue`, `workers` and `status` events as they come; a comment every 15 s.

    `reset` comes first, unless `Last-Event-ID` could be met: look at all anew; no change after it is missed.
    """
    key = credentials.credentials if credentials else ""

    def still_theirs() -> bool:
        try:
            return auth.tenant_of(request, context, key) == tenant
        except errors.Unauthorized:
            return False

    changes: Changes = request.app.state.changes
    return _Events(changes, tenant, _stream(changes, tenant, last_event_id or "", still_theirs))


class _Events(StreamingResponse):
    """Streams events to a listener who counts from its first byte on until it ends, however that is."""

    def __init__(self, changes: Changes, tenant: str, stream: AsyncGenerator[str, None]) -> None:
        super().__init__(stream, media_type="text/event-stream", headers=_HEADERS)
        self._changes, self._tenant, self._stream = changes, tenant, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it; raise Unavailable, before anything is sent, when too many listen."""
        try:
            with self._changes.listening(self._tenant):
                scope[protocol.ENDLESS] = True
                await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()


async def _stream(
    changes: Changes, tenant: str, last_id: str, still_theirs: Callable[[], bool]
) -> AsyncGenerator[str, None]:
    number, sent_at = _number(changes, last_id), time.monotonic()
    await changes.known(tenant)
    while True:
        news = None if number is None else changes.after(number, tenant)
        if news is None:
            text = _event(changes, changes.last, "reset", orjson.dumps({"reachable": changes.reachable}))
        else:
            text = "".join(_event(changes, one.number, one.name, one.data) for one in news)
        number = changes.last
        left = HEARTBEAT_SECONDS - (time.monotonic() - sent_at)
        if not text and left > 0:
            await changes.wait(left)
            continue
        # A key may have been revoked since. The store is read for that now and then.
        if not await asyncio.to_thread(still_theirs):
            return
        yield text or ":\n\n"
        sent_at = time.monotonic()


def _number(changes: Changes, last_id: str) -> int | None:
    """Return the number in an id of this process; None for any other."""
    match = _ID.fullmatch(last_id)
    if match is None or match[1] != changes.epoch or int(match[2]) > changes.last:
        return None
    return int(match[2])


def _event(changes: Changes, number: int, name: str, data: bytes) -> str:
    return f"id: {changes.epoch}.{number}\nevent: {name}\ndata: {data.decode()}\n\n"
