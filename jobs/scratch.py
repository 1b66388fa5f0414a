"""Sorts and look-ups that need not fit in memory: what does not is kept in the scratch directory."""

import heapq
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import orjson

_CACHE_KIBIBYTES = 32_768
_RUN_BYTES = 32_000_000


class Scratch:
    """A database for one piece of work, gone when closed: one transaction, never synced.

    Look up and read by key only. What SQLite must sort it spills to a directory of its own choice.
    """

    def __init__(self, directory: Path, schema: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="longhaul-", dir=directory)
        self.db = sqlite3.connect(Path(self._directory.name) / "scratch.db", isolation_level=None)
        self.db.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{_CACHE_KIBIBYTES};"
            f"{schema}; BEGIN"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.db.close()
        self._directory.cleanup()


class Sorter:
    """Sorts tuples of numbers, text, bytes: runs of some megabytes in memory, sorted, written, and merged."""

    def __init__(self, directory: Path, run_bytes: int = _RUN_BYTES) -> None:
        self._files = ExitStack()
        self._scratch, self._run_bytes = directory, run_bytes
        self._run: list[tuple[Any, ...]] = []
        self._bytes = 0
        self._written: list[BinaryIO] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def add(self, item: tuple[Any, ...], size: int) -> None:
        """Take an item of about `size` bytes. Items compare by their first fields, which must differ."""
        self._run.append(item)
        self._bytes += size
        if self._bytes >= self._run_bytes:
            self._spill()

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield all items in order, once."""
        self._run.sort()
        return heapq.merge(*map(_read, self._written), self._run)

    def _spill(self) -> None:
        self._run.sort()
        file = tempfile.TemporaryFile(prefix="longhaul-", dir=self._scratch)  # noqa: SIM115
        self._files.callback(file.close)
        for item in self._run:
            _write(file, item)
        file.seek(0)
        self._written.append(file)
        self._run, self._bytes = [], 0


def _write(file: BinaryIO, item: tuple[Any, ...]) -> None:
    """Write a line with the fields, in which bytes are their length, and then these bytes."""
    head = [len(field) if isinstance(field, bytes) else [field] for field in item]
    file.write(orjson.dumps(head) + b"\n")
    file.writelines(field for field in item if isinstance(field, bytes))


def _read(file: BinaryIO) -> Iterator[tuple[Any, ...]]:
    while head := file.readline():
        yield tuple(field[0] if isinstance(field, list) else file.read(field) for field in orjson.loads(head))
