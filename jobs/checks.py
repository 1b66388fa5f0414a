"""Structural checks of input lines: what makes a file wrong as a whole. All errors of a file are gathered."""

from dataclasses import dataclass
from typing import Any, NoReturn

from jobs import lines, schema, values
from jobs.records import JobRecord

MAX_CUSTOM_ID = 512


@dataclass(frozen=True)
class InputLine:
    """One well-formed request line. `refusal` is set when the request alone is at fault, by this `param`."""

    number: int
    custom_id: str
    model: str
    body: dict[str, Any]
    refusal: str | None = None
    param: str | None = None


class LineRefused(Exception):
    """An input line that fails its job."""

    def __init__(self, number: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = schema.LineError(code=code, message=message, param=param, line=number)


def check(line: lines.Line, record: JobRecord, max_line_bytes: int) -> InputLine:
    """Return the request on a line; raises LineRefused with what is wrong with its structure."""
    if line.data is None:
        message = f"The line is longer than {max_line_bytes} bytes (LONGHAUL_MAX_LINE_BYTES)."
        raise LineRefused(line.number, "invalid_json_line", message)
    try:
        value, fault = lines.parse(line.data)
    except ValueError as error:
        raise LineRefused(line.number, "invalid_json_line", f"This line is not JSON: {error}.") from None
    if not isinstance(value, dict):
        message = f"The line must be a JSON object, not {values.kind(value)}."
        raise LineRefused(line.number, "invalid_json_line", message)
    custom_id = _custom_id(line.number, value)
    _method_and_url(line.number, value, record.endpoint)
    body = value.get("body")
    if not isinstance(body, dict):
        _refuse_missing(line.number, "body", "an object", body)
    if body.get("stream"):
        raise LineRefused(
            line.number, "streaming_unsupported", "A batch request cannot stream.", "body.stream"
        )
    model = body.get("model")
    if not isinstance(model, str) or not model:
        _refuse_missing(line.number, "body.model", "a model name", model)
    if fault is None:
        return InputLine(line.number, custom_id, model, body)
    # As deep as it lies in the line.
    faulty = (name for name, member in body.items() if lines.fault({"body": {name: member}}))
    param = next(faulty, "body").encode(errors="replace").decode()[:80]
    return InputLine(line.number, custom_id, model, body, f"The request cannot be run. {fault}", param)


def _custom_id(number: int, value: dict[str, Any]) -> str:
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        _refuse_missing(number, "custom_id", f"a string of 1..{MAX_CUSTOM_ID} characters", custom_id)
    if len(custom_id) > MAX_CUSTOM_ID or not _is_text(custom_id):
        found = len(custom_id) if len(custom_id) > MAX_CUSTOM_ID else "half a surrogate pair"
        message = f"custom_id must be text of at most {MAX_CUSTOM_ID} characters; it has {found}."
        raise LineRefused(number, "invalid_custom_id", message, "custom_id")
    return custom_id


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _method_and_url(number: int, value: dict[str, Any], endpoint: str) -> None:
    method, url = value.get("method"), value.get("url")
    if method is None:
        _refuse_missing(number, "method", "'POST'", method)
    if method != "POST":
        raise LineRefused(
            number, "invalid_method", f"method must be 'POST', not {values.short(method)}.", "method"
        )
    if url is None:
        _refuse_missing(number, "url", f"{endpoint!r}", url)
    if url != endpoint:
        message = f"The batch is for {endpoint!r}, but this line's url is {values.short(url)}."
        raise LineRefused(number, "invalid_url", message, "url")


def _refuse_missing(number: int, param: str, wanted: str, found: Any) -> NoReturn:
    message = f"{param} must be {wanted}; it is {'missing or null' if found is None else values.kind(found)}."
    if found == "":
        message = f"{param} must be {wanted}; it is empty."
    raise LineRefused(number, "missing_required_parameter", message, param)
