"""The API's Prometheus metrics: its requests, and the queue's depth read from the ledger at each scrape."""

import logging
import time
from collections.abc import Iterator

import redis
from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs import errors, ids
from jobs.ledger import Ledger

log = logging.getLogger(__name__)


class Depth(Collector):
    """requests_queued{model,bucket}, requests_leased{model} and units_open; without Redis only redis_up 0."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not ask Redis."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Ask the ledger."""
        try:
            depth = self._ledger.depth()
        except (redis.RedisError, errors.RedisUnreachable):
            yield GaugeMetricFamily("longhaul_redis_up", "1 if Redis answers.", 0)
            return
        yield GaugeMetricFamily("longhaul_redis_up", "1 if Redis answers.", 1)
        queued = GaugeMetricFamily(
            "longhaul_requests_queued", "Requests waiting, by length bucket.", labels=["model", "bucket"]
        )
        leased = GaugeMetricFamily(
            "longhaul_requests_leased", "Requests leased to workers.", labels=["model"]
        )
        for fingerprint, model in depth.models.items():
            name = fingerprint.rpartition("@")[0] or fingerprint
            leased.add_metric([name], model["leased"])
            for bucket, count in model["buckets"].items():
                queued.add_metric([name, str(bucket)], count)
        yield queued
        yield leased
        yield GaugeMetricFamily("longhaul_units_open", "Open plan, feed and finalize units.", depth.control)


class Requests:
    """Middleware that counts and times requests by route, and gives each answer an `x-request-id`."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._count = Counter(
            "longhaul_api_requests_total",
            "HTTP requests answered.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "longhaul_api_request_seconds",
            "From a request's arrival to the start of its answer.",
            ["route"],
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Paths that are no route, and methods that are none, would be labels without end.
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._count.labels(method, route, str(message["status"])).inc()
                self._seconds.labels(route).observe(time.monotonic() - began)
                message["headers"] = [*message["headers"], (b"x-request-id", f"req_{ids.ulid()}".encode())]
            await send(message)

        await self._app(scope, receive, counted)


_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


def registry(ledger: Ledger) -> CollectorRegistry:
    """Return the registry of one app."""
    made = CollectorRegistry()
    made.register(Depth(ledger))
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    return made
