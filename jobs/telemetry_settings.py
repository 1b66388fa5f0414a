"""What a process tells about itself, and where; part of the one settings class (jobs.settings)."""

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings


class TelemetrySettings(BaseSettings):
    """Metrics, traces and logs (docs/metrics.md)."""

    metrics_host: str = Field(
        "127.0.0.1", description="Address at which a worker serves its metrics; in a container 0.0.0.0."
    )
    metrics_port: int = Field(
        9464,
        ge=0,
        le=65535,
        description="A worker serves its metrics at the first free one of 32 ports from this one on, so that"
        " several on one machine get along. 0: not at all. The API has its own at `/metrics`.",
    )
    traces: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Send OpenTelemetry traces: auto does when `OTEL_EXPORTER_OTLP_ENDPOINT` is set and"
        " `longhaul[otel]` is installed; on refuses to start without the latter.",
    )
    log_format: Literal["json", "text"] = Field(
        "json", description="What a line of the log of a server is: a JSON object, or text for people."
    )
