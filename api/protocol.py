"""HTTP as uvicorn speaks it, with what it lacks: patience that ends, and errors in the contract's shape."""

import asyncio
import resource
import sys
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from api import errors as shapes
from api import limits
from jobs import errors

ENDLESS = "longhaul.endless"
"""In the scope of a request: its answer ends when the client or the server does."""
_STALLED_SECONDS = 120
"""A reader that does not take what is buffered for it (some 200 kB) within this is cut off."""
_OTHER_DESCRIPTORS = 256
"""File descriptors that are kept for the store, Redis and uploads on disk."""


class Protocol(H11Protocol):
    """One connection. Make a class with `protocol`: who waits for a request is known for one server."""

    idle_seconds: ClassVar[float]
    most_waiting: ClassVar[int]
    waiting: ClassVar[dict["Protocol", asyncio.TimerHandle]]
    """Connections without a request, the one that waits longest first, with the ends of their patience."""

    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; where too many do, the one that has waited longest goes."""
        super().connection_made(transport)
        self._wait()
        while len(self.waiting) > self.most_waiting:
            next(iter(self.waiting))._cut()

    def shutdown(self) -> None:
        """Let the answer be completed, unless it never is."""
        super().shutdown()
        if self._serving and ENDLESS in self.scope:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget()
        self._set_stalled(None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Serve what has arrived."""
        super().handle_events()
        if self._serving:
            self._forget()

    def on_response_complete(self) -> None:
        """Wait for the next request; what still comes of the last one's body falls under the same limit."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Note since when a reader has not read."""
        super().pause_writing()
        self._set_stalled(self.loop.call_later(_STALLED_SECONDS, self.transport.abort))

    def resume_writing(self) -> None:
        """It reads again."""
        self._set_stalled(None)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the contract's shape; h11 knows the status."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == 431:
            self._refuse(errors.HeadTooLarge(headers=limits.MOST_HEADERS, limit=limits.MOST_HEADER_BYTES))
        else:
            self._refuse(errors.InvalidRequest(msg), status)

    @property
    def _serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._forget()
        self.waiting[self] = self.loop.call_later(self.idle_seconds, self._cut)

    def _forget(self) -> None:
        timer = self.waiting.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _cut(self) -> None:
        """End the connection; a client that began a request is told why."""
        self._forget()
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if begun:
            reason = f"its head was not complete within {self.idle_seconds:g} s"
            self._refuse(errors.TooSlow(reason=reason))
        self.transport.close()

    def _refuse(self, error: errors.InvalidRequest, status: int | None = None) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = shapes.answer(error, status)
            headers = [*answer.raw_headers, (b"connection", b"close")]
            reason = STATUS_PHRASES.get(answer.status_code, b"")
            for event in (
                h11.Response(status_code=answer.status_code, headers=headers, reason=reason),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _set_stalled(self, timer: asyncio.TimerHandle | None) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        self._stalled = timer


def protocol(idle_seconds: float) -> type[Protocol]:
    """Return the class of a server's connections, for `uvicorn.run(http=...)`."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(most - _OTHER_DESCRIPTORS, most // 2)
    return type("Protocol", (Protocol,), {"idle_seconds": idle_seconds, "most_waiting": room, "waiting": {}})


def options(idle_seconds: float) -> dict[str, Any]:
    """Return the options of uvicorn that hold what this package promises."""
    return {"http": protocol(idle_seconds), "ws": "none", "log_config": None, "server_header": False}
