"""The input of a dataset run: rows of files or of tables, streamed, each with its number."""

import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from jobs.dataset.input import input_errors, inputs, places, rows, sorting, where
from jobs.dataset.input.rows import Fault, OnFault, Rows, records

__all__ = ["Fault", "OnFault", "Place", "Rows", "Source", "open_source", "records"]

Place: TypeAlias = str | os.PathLike[str] | pa.Table | pa.RecordBatchReader | list[dict[str, Any]]


@dataclass(frozen=True)
class _Choice:
    """What is wanted of the input: columns in order, rows by an expression, how many, in which order."""

    columns: Sequence[str]
    filter: where.Where | None
    limit: int | None
    sort_by: Sequence[str]
    scratch: Path | None


class Source:
    """Rows of an input, the same each time they are read. `schema`: the columns they have.

    In memory are a few batches, and with `sort_by` about 100 MB, however many rows there are.
    """

    def __init__(self, found: inputs.Input, choice: _Choice) -> None:
        self._found, self._readers, self._identity = found, found.readers, found.identity
        self._choice = choice
        self.schema = pa.schema([found.schema.field(name) for name in choice.columns])
        also = [*(choice.filter.columns if choice.filter else ()), *choice.sort_by]
        self._all = pa.schema([found.schema.field(name) for name in dict.fromkeys([*choice.columns, *also])])
        self._starts = [0]
        for reader in self._readers:
            if reader.count is None:
                break
            self._starts.append(self._starts[-1] + reader.count)

    def rows(self, on_fault: OnFault | None = None) -> Iterator[Rows]:
        """Yield all rows from the first, at most 1,000 at a time; `on_fault` is told of records without one.

        Raises InputUnreadable where a file turns out to be damaged and InputChanged where it became another.
        """
        tell = on_fault or rows.ignore
        if self._choice.limit is None:
            found = self._chosen(tell)
        else:
            waiting: list[Fault] = []
            found = _limited(self._chosen(waiting.append), self._choice.limit, waiting, tell)
        if self._choice.sort_by:
            found = sorting.ordered(found, self._all, self._choice.sort_by, self._choice.scratch)
        for each in found:
            yield Rows(each.numbers, each.batch.select(self.schema.names))

    def _chosen(self, tell: OnFault) -> Iterator[Rows]:
        found = self._read(tell)
        return found if self._choice.filter is None else self._choice.filter.kept(found, self.place, tell)

    def narrowed(
        self,
        columns: Sequence[str],
        limit: int | None = None,
        sort_by: Sequence[str] = (),
        scratch: Path | None = None,
    ) -> "Source":
        """Return the same rows with some of their columns, at most `limit`, and in another order."""
        least = min((most for most in (limit, self._choice.limit) if most is not None), default=None)
        return Source(self._found, _Choice(columns, self._choice.filter, least, sort_by, scratch))

    @property
    def takes_all(self) -> bool:
        """Whether every row of the input is among the rows."""
        return self._choice.filter is None and self._choice.limit is None

    def count(self) -> int | None:
        """Return how many rows there are before `where` and `limit`; None: not known without reading them."""
        counts = [reader.count for reader in self._readers]
        return None if None in counts else sum(count or 0 for count in counts)

    def place(self, row: int) -> str:
        """Return the file of a row, and where in it the row is: `data/part-3.jsonl line 17`."""
        at = bisect_right(self._starts, row) - 1
        if at >= len(self._readers):
            return f"row {row}"
        reader = self._readers[at]
        return f"{reader.shown} {reader.place(row - self._starts[at])}"

    def identity(self) -> dict[str, Any]:
        """Return what was found when the input was opened: files with bytes and ns of their last change."""
        return self._identity

    def check_same(self) -> None:
        """Raise InputChanged if a file is no longer the one that was opened."""
        for file in self._found.files:
            places.check_same(file)

    def _read(self, tell: OnFault) -> Iterator[Rows]:
        start = 0
        for at, reader in enumerate(self._readers):
            self._starts[at : at + 1] = [start]  # appends what was not known yet
            start = yield from reader.read(self._all, start, tell)


def open_source(
    place: Place,
    *,
    columns: Sequence[str] | None = None,
    needed: Collection[str] = (),
    where: str | None = None,
    limit: int | None = None,
    sort_by: Sequence[str] = (),
    scratch: Path | None = None,
    outputs: Sequence[Path] = (),
) -> Source:
    """Open an input for reading, and check all that can be checked without reading it through.

    `place`: a file of Parquet, Arrow, CSV, TSV or JSON lines, a directory or glob of those, s3://bucket/...,
    a directory of Hugging Face's save_to_disk, or rows in memory. Files of JSON lines are read through once,
    for their columns. A RecordBatchReader is copied to a file in `scratch`.

    `columns`: those that rows have, in this order (None: all), then those of `needed` not among them.
    `where`: an SQL expression over all columns; rows for which it is null are left out. `limit`: of the rows
    that pass `where` the first so many of the input. `sort_by`: the order in which those then come.
    `outputs`: directories that are no part of the input, though they may lie in it.

    Raises input_errors.InputError, of a kind for each thing that can be wrong.
    """
    found = inputs.opened(place, scratch, outputs)
    known = found.schema.names
    for name in (*(columns or ()), *needed, *sort_by):
        if name not in known:
            raise input_errors.missing_column(name, known)
    wanted = list(dict.fromkeys([*(known if columns is None else columns), *needed]))
    return Source(found, _Choice(wanted, _filter(where, found.schema), limit, list(sort_by), scratch))


def _filter(expression: str | None, schema: pa.Schema) -> where.Where | None:
    return None if expression is None else where.Where(expression, schema)


def _limited(batches: Iterator[Rows], limit: int, waiting: list[Fault], tell: OnFault) -> Iterator[Rows]:
    """Yield the first rows; tell of what is wrong before the last of them: a reader looks further ahead."""
    left = limit
    while left > 0:
        each = next(batches, None)
        if each is None:
            break
        numbers = each.numbers.slice(0, left)
        left -= len(numbers)
        _tell(waiting, tell, numbers[-1].as_py())
        yield Rows(numbers, each.batch.slice(0, len(numbers)))
    if left > 0:
        _tell(waiting, tell, None)


def _tell(waiting: list[Fault], tell: OnFault, last: int | None) -> None:
    """Tell of the faults up to a row, None: of all."""
    for fault in waiting:
        if last is None or fault.row <= last:
            tell(fault)
    waiting[:] = [fault for fault in waiting if last is not None and fault.row > last]
