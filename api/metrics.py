"""The API's Prometheus metrics: its requests, and what the ledger tells (api.depth)."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.depth import Depth
from jobs import ids, log
from jobs.ledger import Ledger
from jobs.metrics import shared
from jobs.metrics.families import Family
from jobs.settings import Settings

FAMILIES = COUNT, SECONDS = (
    Family("api_requests_total", "counter", "HTTP requests answered.", ("method", "route", "status")),
    Family(
        "api_request_seconds",
        "histogram",
        "From a request's arrival to the start of its answer.",
        ("route",),
    ),
)


class Requests:
    """Middleware: counts and times requests by route; gives each an `x-request-id`, for answer and log."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._count = Counter(COUNT.full_name, COUNT.help, COUNT.labels, registry=registry)
        self._seconds = Histogram(SECONDS.full_name, SECONDS.help, SECONDS.labels, registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, request_id = time.monotonic(), f"req_{ids.ulid()}"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Paths that are no route, and methods that are none, would be labels without end.
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._count.labels(method, route, str(message["status"])).inc()
                self._seconds.labels(route).observe(time.monotonic() - began)
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        with log.about(request_id=request_id):
            await self._app(scope, receive, counted)


_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


def registry(ledger: Ledger, settings: Settings) -> CollectorRegistry:
    """Return the registry of one app."""
    made = CollectorRegistry()
    made.register(Depth(ledger, settings.namespace))
    shared.register(made, settings.models)
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    return made
