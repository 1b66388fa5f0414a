"""What a dataset directory remembers, in SQLite: outputs by key, and which key each row of this pass has."""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from jobs import errors

_SCHEMA = """
CREATE TABLE IF NOT EXISTS outputs (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, failed INTEGER NOT NULL, value BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS failures ON outputs (id) WHERE failed;
CREATE TABLE IF NOT EXISTS wanted (
    row INTEGER NOT NULL, sample INTEGER NOT NULL, key BLOB, fault TEXT, PRIMARY KEY (row, sample)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (seconds REAL NOT NULL);
CREATE TABLE IF NOT EXISTS seen (prompt BLOB PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID;
"""
_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_KEYS_ASKED = 500
"""Keys in one question, below what SQLite takes as parameters."""


class StateUnusable(errors.LonghaulError):
    """{path} cannot be used: {reason}."""


class StateDamaged(StateUnusable):
    """{path} is damaged: {reason}. Remove it; what it held is computed again."""


@dataclass(frozen=True)
class Output:
    """What came of one request. `error` is (code, message) of one that has no text; times in seconds."""

    text: str | None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    latency_seconds: float | None = None
    attempt: int = 0
    valid: bool = True
    error: tuple[str, str] | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None and self.text is None

    def to_json(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        found = orjson.loads(data)
        error = found.pop("error")
        return cls(**found, error=tuple(error) if error else None)


class Outputs:
    """Outputs by key in one file, which several runs may share: the later of two outputs of a key stays."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with self._told():
            self._db = sqlite3.connect(path, timeout=60, isolation_level=None)
        try:
            with self._told():
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._db.executescript(_SCHEMA)
        except StateUnusable:
            self._db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Output]:
        """Return the outputs there are of some keys."""
        asked, found = list(keys), {}
        for start in range(0, len(asked), _KEYS_ASKED):
            some = asked[start : start + _KEYS_ASKED]
            marks = ",".join("?" * len(some))
            for key, value in self._all(f"SELECT key, value FROM outputs WHERE key IN ({marks})", some):
                found[key] = self._output(value)
        return found

    def _output(self, value: bytes) -> Output:
        try:
            return Output.from_json(value)
        except (ValueError, LookupError, TypeError) as error:
            raise StateDamaged(path=self._path, reason=error) from None

    def keep(self, outputs: Iterable[tuple[bytes, Output]]) -> None:
        """Keep outputs, all or none of them. Not even a loss of power loses them then."""
        # The job that they are of is removed after this. All else is found again in each pass.
        self._db.execute("PRAGMA synchronous = FULL")
        self._many(
            "INSERT INTO outputs (key, failed, value) VALUES (?, ?, ?)"
            " ON CONFLICT (key) DO UPDATE SET failed = excluded.failed, value = excluded.value",
            ((key, output.failed, output.to_json()) for key, output in outputs),
        )
        self._db.execute("PRAGMA synchronous = NORMAL")

    def _all(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._told():
            return self._db.execute(statement, values).fetchall()

    def _many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._transaction():
            self._db.executemany(statement, rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._told():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            damaged = getattr(error, "sqlite_errorname", "").startswith(_DAMAGED)
            kind = StateDamaged if damaged else StateUnusable
            raise kind(path=self._path, reason=error) from None


class State(Outputs):
    """The outputs of a directory, and what its rows want of them in this pass."""

    def begin(self, is_first: bool = True) -> None:
        """Forget what the rows of an earlier pass wanted, and what failed: that is tried again.

        Unless it is the dataset's first pass, prompts that were seen stay so.
        """
        with self._transaction():
            for forgotten in ("outputs WHERE failed", "wanted", *["seen"] * is_first):
                self._db.execute(f"DELETE FROM {forgotten}")

    def spend(self, seconds: float) -> None:
        """Note how long a job ran in this run."""
        self._many("INSERT INTO spent VALUES (?)", [(seconds,)])

    def spent(self) -> float:
        """Return how long jobs of all runs have run (seconds)."""
        ((seconds,),) = self._all("SELECT COALESCE(SUM(seconds), 0) FROM spent")
        return float(seconds)

    def want(self, rows: Iterable[tuple[int, int, bytes]]) -> None:
        """Note the key of each (row, sample)."""
        self._many("INSERT OR REPLACE INTO wanted (row, sample, key) VALUES (?, ?, ?)", rows)

    def fault(self, rows: Iterable[tuple[int, int, str]]) -> None:
        """Note why a (row, sample) has no request."""
        self._many("INSERT OR REPLACE INTO wanted (row, sample, fault) VALUES (?, ?, ?)", rows)

    def times_seen(self, prompts: Sequence[bytes]) -> list[int]:
        """Count prompts (digests); return for each how often it came before."""
        count = (
            "INSERT INTO seen VALUES (?, 1) ON CONFLICT (prompt) DO UPDATE SET times = times + 1"
            " RETURNING times - 1"
        )
        with self._transaction():
            return [self._db.execute(count, (prompt,)).fetchone()[0] for prompt in prompts]

    def wanted(self, first: int, last: int) -> dict[tuple[int, int], tuple[bytes | None, str | None]]:
        """Return key or fault of each (row, sample), for the rows from `first` to `last`."""
        found = self._all(
            "SELECT row, sample, key, fault FROM wanted WHERE row BETWEEN ? AND ?", (first, last)
        )
        return {(row, sample): (key, fault) for row, sample, key, fault in found}
