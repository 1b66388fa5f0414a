"""Read a batch input file: lines end at \\n alone, are counted from 1, and are never held beyond a limit."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import orjson

BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line that is not blank. `data` is None when it is longer than the limit."""

    number: int
    data: bytes | None


def read(stream: BinaryIO, max_line_bytes: int) -> Iterator[Line]:
    """Yield the lines of a stream that are not blank, without byte order mark, \\r and \\n."""
    number = 0
    while chunk := stream.readline(max_line_bytes + 1):
        number += 1
        whole = chunk
        while len(chunk) > max_line_bytes and not chunk.endswith(b"\n"):
            whole, chunk = b"", stream.readline(max_line_bytes + 1)
        if not whole:
            yield Line(number, None)
            continue
        if number == 1:
            whole = whole.removeprefix(BOM)
        if data := whole.strip(b" \t\r\n"):
            yield Line(number, data)


class Parsed(NamedTuple):
    """A line's JSON value. `surrogate`: it holds half a surrogate pair, which is JSON but no Unicode text."""

    value: Any
    surrogate: bool = False


def parse(data: bytes) -> Parsed:
    """Parse one line; raises ValueError with the reason and the column."""
    try:
        return Parsed(orjson.loads(data))
    except orjson.JSONDecodeError as error:
        try:
            value = json.loads(data, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise ValueError(str(error)) from None
        return Parsed(value, surrogate=has_surrogate(value))


def has_surrogate(value: Any) -> bool:
    """Tell whether a JSON value holds text that UTF-8 cannot encode."""
    return any("\ud800" <= char <= "\udfff" for char in json.dumps(value, ensure_ascii=False))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
