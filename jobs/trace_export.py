"""The OpenTelemetry provider of a process. Imports its SDK: only who traces loads this."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator

_next = threading.local()


class Ids(IdGenerator):
    """Ids that were asked for, else random ones: of the system, since anybody may seed Python's."""

    def generate_trace_id(self) -> int:
        return _wanted("trace") or int.from_bytes(os.urandom(16)) or 1

    def generate_span_id(self) -> int:
        return _wanted("span") or int.from_bytes(os.urandom(8)) or 1


def _wanted(kind: str) -> int | None:
    found: int | None = getattr(_next, kind, None)
    return found


@contextmanager
def forced(trace_id: int, span_id: int) -> Iterator[None]:
    """Give what this thread starts inside these ids."""
    _next.trace, _next.span = trace_id, span_id
    try:
        yield
    finally:
        _next.trace = _next.span = None


def provider(service: str, instance: str, processor: SpanProcessor | None = None) -> TracerProvider:
    """Return a provider that sends to where OTEL_EXPORTER_OTLP_ENDPOINT says, or to a processor."""
    named = {"service.name": service, "service.instance.id": instance}
    if "OTEL_SERVICE_NAME" in os.environ:
        del named["service.name"]
    made = TracerProvider(resource=Resource.create(named), id_generator=Ids(), shutdown_on_exit=False)
    made.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
    return made
