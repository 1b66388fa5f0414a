"""Read a batch input file: lines end at \\n alone, are counted from 1, and are never held beyond a limit."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import orjson

from jobs import values

BOM = b"\xef\xbb\xbf"
MOST_LEVELS = 200
"""How deeply a request may nest. Beyond a thousand, walking it would end the process's stack."""


class Line(NamedTuple):
    """A line that is not blank. `data` is None when it is longer than the limit."""

    number: int
    data: bytes | None


def read(stream: BinaryIO, max_line_bytes: int) -> Iterator[Line]:
    """Yield the lines of a stream that are not blank, without byte order mark, \\r and \\n.

    The limit counts a line without these.
    """
    room = len(BOM) + max_line_bytes + len(b"\r\n")
    number = 0
    while chunk := stream.readline(room):
        number += 1
        data = chunk.removeprefix(BOM) if number == 1 else chunk
        data = data.removesuffix(b"\n").removesuffix(b"\r")
        while len(chunk) == room and not chunk.endswith(b"\n"):
            chunk = stream.readline(room)
        if len(data) > max_line_bytes:
            yield Line(number, None)
        elif data := data.strip(b" \t\r"):
            yield Line(number, data)


class Parsed(NamedTuple):
    """A line's JSON value. `fault`: it is JSON, but no request can be made of it, for this reason."""

    value: Any
    fault: str | None = None


def parse(data: bytes) -> Parsed:
    """Parse one line; raises ValueError with the reason and the column."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return _parse_leniently(data, f"{error.msg} at column {error.colno}")
    # Counting brackets is much cheaper than walking the value, and nearly always enough.
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > MOST_LEVELS and values.too_deep(value, MOST_LEVELS):
        return Parsed(value, f"It nests more than {MOST_LEVELS} levels deep.")
    return Parsed(value)


def _parse_leniently(data: bytes, reason: str) -> Parsed:
    """Parse what orjson refuses though it is JSON, such as half a surrogate pair, which is no text."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant)
        if values.too_deep(value, MOST_LEVELS):
            return Parsed(value, f"It nests more than {MOST_LEVELS} levels deep.")
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Parsed(value, "It holds half a surrogate pair (\\ud800..\\udfff), which is no text.")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError(reason) from None
    return Parsed(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
