"""Refuse what no request needs before anything looks at it: long targets, many headers, compressed bodies."""

from starlette.types import ASGIApp, Receive, Scope, Send

from api import errors as shapes
from jobs import errors

MOST_TARGET_BYTES = 4096
MOST_HEADERS = 64
MOST_HEADER_BYTES = 16_384


class Limits:
    """Middleware that answers 414, 431 and 415; nothing is ever decompressed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        refused = _refused(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await shapes.answer(refused)(scope, receive, send)


def _refused(scope: Scope) -> errors.InvalidRequest | None:
    headers = scope["headers"]
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MOST_TARGET_BYTES:
        return errors.TargetTooLong(limit=MOST_TARGET_BYTES)
    if len(headers) > MOST_HEADERS or sum(map(_size, headers)) > MOST_HEADER_BYTES:
        return errors.HeadTooLarge(headers=MOST_HEADERS, limit=MOST_HEADER_BYTES)
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            return errors.Compressed(encoding=value.decode("latin-1")[:40])
    return None


def _size(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1])
