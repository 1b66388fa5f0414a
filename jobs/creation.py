"""What a client sends to create a batch, checked field by field and refused by name."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from jobs import errors, schema

SERVED_ENDPOINTS = schema.ENDPOINTS
MAX_WINDOW_SECONDS = 365 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,8})([mhd])")
_UNITS = {"m": 60, "h": 3600, "d": 86_400}


class OutputExpiry(BaseModel):
    """When the output files of a batch expire."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000, description="Seconds after the output file's creation.")


class NewBatch(BaseModel):
    """The body of `POST /v1/batches`. Exactly one of `input_file_id` and `requests` is given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    endpoint: str = Field(
        description=f"One of {', '.join(SERVED_ENDPOINTS)}; every line's url must equal it."
    )
    completion_window: str = Field(
        description="'24h', or another `<n>m`, `<n>h`, `<n>d`. What has not run by then is `batch_expired`."
    )
    input_file_id: str | None = Field(None, description="A file uploaded with purpose 'batch'.")
    requests: list[dict[str, Any]] | None = Field(
        None, description="The requests themselves, instead of a file: the objects its lines would hold."
    )
    metadata: dict[str, Any] | None = Field(
        None, description="At most 16 pairs of strings; keys to 64 characters, values to 512."
    )
    output_expires_after: OutputExpiry | None = None
    priority: int | None = Field(
        None, ge=-100, le=100, description="Longhaul's own: jobs of higher priority are fed first. Default 0."
    )

    @field_validator("endpoint")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        if value not in SERVED_ENDPOINTS:
            raise refusal(
                f"endpoint must be one of {', '.join(SERVED_ENDPOINTS)}, not {value!r:.80}.", "endpoint"
            )
        return value

    @field_validator("completion_window")
    @classmethod
    def _window(cls, value: str) -> str:
        window_seconds(value)
        return value

    @field_validator("metadata")
    @classmethod
    def _metadata(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        check_metadata(value)
        return value


def parse(body: Any) -> NewBatch:
    """Return the checked body; raise InvalidRequest that names the first wrong field."""
    if not isinstance(body, dict):
        raise refusal("The body must be a JSON object.", None)
    try:
        new = NewBatch.model_validate(body)
    except ValidationError as error:
        raise from_pydantic(error.errors(include_url=False)) from None
    if (new.input_file_id is None) == (new.requests is None):
        problem = "is required" if new.requests is None else "and requests exclude each other"
        code = "missing_required_parameter" if new.requests is None else "invalid_value"
        raise refusal(f"input_file_id {problem} (or give requests inline).", "input_file_id", code)
    if new.requests is not None and not new.requests:
        raise refusal("requests must hold at least one request.", "requests")
    return new


def window_seconds(window: str) -> int:
    """Return the length of a completion window; raise InvalidRequest for a form that is not ours."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_SECONDS:
        raise refusal(
            "completion_window must be '24h' or another <n>m, <n>h or <n>d of at most 365 days, "
            f"not {window!r:.80}.",
            "completion_window",
        )
    return seconds


def check_metadata(metadata: dict[str, Any] | None) -> None:
    """Raise InvalidRequest unless it is null or at most 16 pairs of short strings, in characters."""
    if metadata is None:
        return
    if len(metadata) > 16:
        raise refusal(f"metadata has {len(metadata)} pairs; at most 16 are allowed.", "metadata")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise refusal(f"metadata[{key!r:.80}] must be a string, not {_kind(value)}.", "metadata")
        if len(key) > 64:
            raise refusal(f"A metadata key has {len(key)} characters; at most 64 are allowed.", "metadata")
        if len(value) > 512:
            raise refusal(
                f"metadata[{key!r}] has {len(value)} characters; at most 512 are allowed.", "metadata"
            )


def refusal(message: str, param: str | None, code: str = "invalid_value") -> errors.InvalidRequest:
    """Return the error of one parameter."""
    error = errors.InvalidRequest(message, param=param)
    error.code = code
    return error


def from_pydantic(found: Sequence[Any], skip: int = 0) -> errors.InvalidRequest:
    """Turn the first of pydantic's errors into ours; `skip` parts of its location are not the client's."""
    first = found[0]
    path = [str(part) for part in first["loc"][skip:]]
    param = ".".join(path) or None
    if first["type"] == "missing":
        return refusal(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return refusal(f"Unknown parameter: {param!r:.200}.", param and param[:200], "unknown_parameter")
    message = first["msg"][:1].lower() + first["msg"][1:]
    return refusal(f"Invalid value for {param!r}: {message}.", param)


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", list: "an array", dict: "an object"}
    return names.get(type(value), "null")
