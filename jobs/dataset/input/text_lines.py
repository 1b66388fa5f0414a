"""Files as lines of bytes, decompressed on the way, and where in them each row was."""

import lzma
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from jobs.dataset.input import input_errors, places, rows

LONGEST = 64 << 20
"""Bytes of the longest line that is read; a longer one is passed over."""
_BLOCK = 256 << 10
_MOST_MARKS = 100_000
_DAMAGED = re.compile("zlib inflate|bz2 decompress|ZSTD decompress|LZ4 decompress|Truncated compressed")
_POINTER = b"version https://git-lfs.github.com/spec/"


Record = tuple[int, Any, int]
"""A row's position in its file, from 0; what was read; its bytes."""
OnBad = Callable[[int, int, str], None]
"""Told of a record that cannot be read: its position, its line from 1, and why."""


class CutShort(Exception):
    """What follows in the file cannot be read; the message is the library's."""


def stream(file: places.File) -> Any:
    """Open a file for reading from its start, decompressed."""
    raw = file.filesystem.open_input_stream(file.path, compression=None)
    if file.codec == "xz":
        return lzma.LZMAFile(raw)
    return raw if file.codec is None else pa.CompressedInputStream(raw, file.codec)


def lines(file: places.File) -> Iterator[bytes | None]:
    """Yield the lines of a file, each without its newline; None for one that is longer than LONGEST.

    Raises CutShort where a compressed file breaks off.
    """
    pieces: list[bytes] = []
    held = 0
    for block in _blocks(file):
        first, *others = block.split(b"\n")
        pieces.append(first)
        held += len(first)
        if held > LONGEST:
            pieces = [b""]
        if not others:
            continue
        yield b"".join(pieces) if held <= LONGEST else None
        yield from others[:-1]
        pieces, held = [others[-1]], len(others[-1])
    if held:
        yield b"".join(pieces) if held <= LONGEST else None


def check_text(file: places.File) -> None:
    """Raise InputUnreadable for a file that cannot be opened, or is plainly no text in UTF-8."""
    try:
        with stream(file) as opened:
            start = opened.read(64)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise input_errors.InputUnreadable(where=file.shown, reason=error) from None
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise input_errors.InputUnreadable(where=file.shown, reason="it is UTF-16; convert it to UTF-8")
    check_pointer(file, start)


def check_pointer(file: places.File, start: bytes) -> None:
    """Raise InputUnreadable for the stand-in of a file that Git LFS has not fetched."""
    if start.startswith(_POINTER):
        reason = "it is a pointer of Git LFS; fetch the file with git lfs pull"
        raise input_errors.InputUnreadable(where=file.shown, reason=reason)


def _blocks(file: places.File) -> Iterator[bytes]:
    first = True
    try:
        with stream(file) as opened:
            while block := opened.read(_BLOCK):
                yield block.removeprefix(b"\xef\xbb\xbf") if first else block
                first = False
    except (OSError, EOFError, lzma.LZMAError) as error:
        if isinstance(error, OSError) and not _DAMAGED.match(str(error)):  # such as a server that is gone
            raise input_errors.InputUnreadable(where=file.shown, reason=error) from None
        raise CutShort(str(error)) from None


class Marks:
    """On which line each row of a file began.

    Kept is where the distance of row and line changes: at blank lines and after rows of several lines. Of
    these a file may have any number, so from the 100,000th on a row's line is not exact.
    """

    def __init__(self) -> None:
        self._positions = array("q", [0])
        self._lines = array("q", [1])

    def note(self, position: int, line: int) -> None:
        """Remember the line (from 1) of a row (from 0)."""
        last, lines = self._positions[-1], self._lines
        if position - last != line - lines[-1] and position >= last and len(lines) < _MOST_MARKS:
            self._positions.append(position)
            lines.append(line)

    def place(self, position: int) -> str:
        """Return `line 17`, or `row 16, after line 9` where that is all that is known."""
        at = bisect_right(self._positions, position) - 1
        line = self._lines[at] + position - self._positions[at]
        if len(self._lines) == _MOST_MARKS and at == _MOST_MARKS - 1:
            return f"row {position}, after line {line - 1}"
        return f"line {line}"


def batches(records: Iterator[Record]) -> Iterator[tuple[list[int], list[Any]]]:
    """Yield positions and values of as many records at a time as a batch holds."""
    positions: list[int] = []
    values: list[Any] = []
    held = 0
    for position, value, size in records:
        positions.append(position)
        values.append(value)
        held += size
        if len(values) >= rows.BATCH_ROWS or held >= rows.BATCH_BYTES:
            yield positions, values
            positions, values, held = [], [], 0
    if values:
        yield positions, values
