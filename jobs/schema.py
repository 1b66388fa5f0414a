"""The wire objects of the Files and Batches API: strict JSON, every field always present."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class File(Wire):
    """An uploaded or produced file; times in unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class LineError(Wire):
    """One error of a batch's input file; `line` counts from 1, blank lines included."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineErrors(Wire):
    object: Literal["list"] = "list"
    data: list[LineError]


class RequestCounts(Wire):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(Wire):
    cached_tokens: int = 0


class OutputDetails(Wire):
    reasoning_tokens: int = 0


class Usage(Wire):
    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class Batch(Wire):
    """The wire form of a job."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: Usage = Usage()
    running_seconds: float | None = None
    """Longhaul's own, as is `tokens_per_second`: those of the summary, once the batch has ended."""
    tokens_per_second: float | None = None
    metadata: dict[str, str] | None = None


class Page(Wire):
    """One page of a list, newest first."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
