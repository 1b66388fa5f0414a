"""What is not among the rows of a dataset: rows that failed and outputs without their form."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from jobs.dataset.input import rows
from jobs.dataset.output import json_rows, shards, writing

ERRORS, INVALID = "errors", "invalid"
_AT_ONCE = 1000


@dataclass(frozen=True)
class Fault:
    """Why a row of the input, or one sample of it, has no output."""

    row: int
    place: str
    sample: int
    step: str
    code: str
    message: str


@dataclass(frozen=True)
class Invalid:
    """An output that has not the form it should have, and the row it is of."""

    row: int
    place: str
    sample: int
    step: str
    output: str
    error: str
    input: dict[str, Any]


_NAMED = [("row", pa.int64()), ("place", pa.string()), ("sample", pa.int32()), ("step", pa.string())]
_TEXT = pa.string()
_SCHEMAS = {
    ERRORS: pa.schema([*_NAMED, ("code", _TEXT), ("message", _TEXT)]),
    INVALID: pa.schema([*_NAMED, ("output", _TEXT), ("error", _TEXT), ("input", _TEXT)]),
}


class Apart:
    """Takes faults and invalid outputs, and writes errors.parquet and invalid.parquet if there are any."""

    def __init__(self, directory: Path) -> None:
        self._writers = {
            name: writing.Writer(directory, schema, name=name, sharded=False)
            for name, schema in _SCHEMAS.items()
        }
        self._waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in _SCHEMAS}
        self.counts = dict.fromkeys(_SCHEMAS, 0)
        self.unreadable = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.abandon()

    def unreadable_row(self, fault: rows.Fault) -> None:
        """Take a record of the input that could not be read."""
        self.unreadable += 1
        self.fault(Fault(fault.row, fault.where, 0, "read", "unreadable", fault.message))

    def fault(self, fault: Fault) -> None:
        self._add(ERRORS, asdict(fault))

    def invalid(self, output: Invalid) -> None:
        given = json_rows.encoded(output.input).decode().rstrip("\n")
        self._add(INVALID, asdict(output) | {"input": given})

    def publish(self) -> tuple[shards.File, ...]:
        """Put the files in their places, and return what they are."""
        for name, writer in self._writers.items():
            self._flush(name)
            writer.publish()
        return tuple(file for writer in self._writers.values() for file in writer.files)

    def _add(self, name: str, record: dict[str, Any]) -> None:
        self.counts[name] += 1
        self._waiting[name].append(record)
        if len(self._waiting[name]) >= _AT_ONCE:
            self._flush(name)

    def _flush(self, name: str) -> None:
        records, self._waiting[name] = self._waiting[name], []
        if records:
            self._writers[name].add(pa.RecordBatch.from_pylist(records, schema=_SCHEMAS[name]))
