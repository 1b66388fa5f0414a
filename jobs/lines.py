"""Read a batch input file: lines end at \\n alone, are counted from 1, and are never held beyond a limit."""

import json
import math
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


class Counting:
    """A file whose lines are counted while it is read."""

    def __init__(self, data: BinaryIO) -> None:
        self._data = data
        self._ends, self._last = 0, b"\n"

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        chunk = self._data.read(size)
        self._ends += chunk.count(b"\n")
        self._last = chunk[-1:] or self._last
        return chunk

    @property
    def lines(self) -> int:
        """The lines read so far, blank ones too."""
        return self._ends + (self._last != b"\n")


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
    return Parsed(value, _depth_fault(value) if brackets > MOST_LEVELS else None)


def fault(value: Any) -> str | None:
    """Return why no request can be made of a JSON value, None if it can."""
    if deep := _depth_fault(value):
        return deep
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "It holds half a surrogate pair (\\ud800..\\udfff), which is no text."
    except ValueError:
        return "It holds a number beyond the range of 64-bit floats."
    return None


def _depth_fault(value: Any) -> str | None:
    deep = values.too_deep(value, MOST_LEVELS)
    return f"It nests more than {MOST_LEVELS} levels deep." if deep else None


def _parse_leniently(data: bytes, reason: str) -> Parsed:
    """Parse what orjson refuses though it is JSON, such as half a surrogate pair, which is no text."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant, parse_int=_number)
        return Parsed(value, fault(value))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError(reason) from None


def _number(digits: str) -> int | float:
    """Return an integer, or a float where 64 bits do not hold it, as orjson does."""
    number = int(digits) if len(digits) <= len(str(-(2**63))) else math.inf
    return number if -(2**63) <= number < 2**64 else float(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
