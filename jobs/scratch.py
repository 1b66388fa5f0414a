"""Sorts and look-ups that need not fit in memory: a temporary SQLite database with a small cache."""

import sqlite3
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

_CACHE_KIBIBYTES = 32_768


class Scratch:
    """A database for one piece of work, gone when closed: one transaction, never synced."""

    def __init__(self, directory: Path, schema: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="longhaul-", dir=directory)
        self.db = sqlite3.connect(Path(self._directory.name) / "scratch.db", isolation_level=None)
        self.db.executescript(
            f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{_CACHE_KIBIBYTES};"
            f"PRAGMA temp_store = FILE; {schema}; BEGIN"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.db.close()
        self._directory.cleanup()
