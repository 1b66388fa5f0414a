"""OpenTelemetry traces: one for each job, whichever processes its spans come from.

Trace and first span have ids that follow from the job's, so nobody passes a context on: whoever knows the
job can add a span. A client that sent a `traceparent` has the job in its own trace. Spans are noted when they
have ended. Attributes hold names and counts, never a prompt, an output, or the text of an error.
"""

import hashlib
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from jobs import errors
from jobs.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext

log = logging.getLogger(__name__)
Attributes = Mapping[str, str | int | float | Sequence[str]]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""What OpenTelemetry's own exporter reads."""
FIRST = "create"
"""The span that all others of a job hang on."""
_CLOSE_SECONDS = 2.0
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class Span:
    """What took a job's time, from `began` to `ended` (unix seconds); `error` is the kind of one.

    `traceparent` is what the client sent with the job, if it did (W3C Trace Context).
    """

    job_id: str
    traceparent: str | None
    name: str
    began: float
    ended: float
    attributes: Attributes
    error: str | None = None


class Traces(Protocol):
    """Where spans go."""

    on: bool

    def note(self, span: Span) -> None:
        """Take a span. Never raises, never waits."""

    def close(self) -> None:
        """Send what is noted, within two seconds."""


class Off:
    """Traces that nobody wants."""

    on = False

    def note(self, span: Span) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_traces(settings: Settings, service: str, instance: str) -> Traces:
    """Return where the spans of this process go; raises SettingsError when they cannot go anywhere."""
    if settings.traces == "off" or (settings.traces == "auto" and not _asked_for()):
        return Off()
    try:
        from jobs import trace_export
    except ImportError:
        if settings.traces == "on":
            message = "LONGHAUL_TRACES=on needs longhaul[otel], which is not installed."
            raise errors.SettingsError(message) from None
        log.warning("no traces: longhaul[otel] is not installed", extra={"endpoint_in": ENDPOINTS[0]})
        return Off()
    return Exported(trace_export.provider(service, instance))


def _asked_for() -> bool:
    """Tell whether OpenTelemetry's own variables ask for traces."""
    off = os.environ.get("OTEL_TRACES_EXPORTER") == "none" or os.environ.get("OTEL_SDK_DISABLED") == "true"
    return not off and any(map(os.environ.get, ENDPOINTS))


class Exported:
    """Traces that an OpenTelemetry provider exports, in a thread of its own."""

    on = True

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import trace

        from jobs import trace_export

        self._api, self._forced = trace, trace_export.forced
        self._provider = provider
        self._tracer = provider.get_tracer("longhaul")

    def note(self, span: Span) -> None:
        try:
            self._export(span)
        except Exception as failure:
            facts = {"job": span.job_id, "span": span.name, "reason": repr(failure)}
            log.warning("span lost", extra=facts)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def _export(self, span: Span) -> None:
        api, first = self._api, span.name == FIRST
        above = self._sent(span.traceparent) if first else self._first(span.job_id, span.traceparent)
        context = api.set_span_in_context(api.NonRecordingSpan(above or api.INVALID_SPAN_CONTEXT))
        with self._forced(*ids_of(span.job_id)) if first else nullcontext():
            exported = self._tracer.start_span(
                span.name,
                context,
                attributes={"longhaul.job": span.job_id, **span.attributes},
                start_time=int(span.began * 1e9),
            )
        if span.error is not None:
            exported.set_attribute("error.type", span.error)
            exported.set_status(api.StatusCode.ERROR)
        exported.end(int(max(span.began, span.ended) * 1e9))

    def _sent(self, traceparent: str | None) -> "SpanContext | None":
        """Return the client's span, if it sent one."""
        if traceparent is None:
            return None
        _, trace, span, flags = traceparent.split("-")
        return self._context(int(trace, 16), int(span, 16), bool(int(flags, 16) & 1))

    def _first(self, job_id: str, traceparent: str | None) -> "SpanContext":
        """Return the job's first span, sampled as whoever noted it decided."""
        trace_id, span_id = ids_of(job_id)
        if (sent := self._sent(traceparent)) is not None:
            return self._context(sent.trace_id, span_id, sent.trace_flags.sampled)
        decision = self._provider.sampler.should_sample(None, trace_id, FIRST).decision
        return self._context(trace_id, span_id, decision.name == "RECORD_AND_SAMPLE")

    def _context(self, trace_id: int, span_id: int, sampled: bool) -> "SpanContext":
        flags = self._api.TraceFlags(int(sampled))
        return self._api.SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)


def ids_of(job_id: str) -> tuple[int, int]:
    """Return the ids of a job's trace and of its first span."""
    digest = hashlib.sha256(b"trace:" + job_id.encode()).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


def checked(traceparent: str | None) -> str | None:
    """Return the header if it is one of W3C Trace Context; another is as none, as that asks."""
    return traceparent if traceparent and _TRACEPARENT.fullmatch(traceparent) else None
