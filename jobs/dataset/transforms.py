"""Steps that take no model: each takes a stream of rows and gives one. Rows keep their numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc

from jobs import errors
from jobs.dataset import near, quality, shape
from jobs.dataset.input import input_errors, rows, where
from jobs.dataset.input.rows import Rows

Stream = Iterator[Rows]
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


class NotAList(errors.InvalidRequest):
    """expand needs a column of lists; {column!r} is {type}."""


class NotText(errors.InvalidRequest):
    """{step} needs a column of text; {column!r} is {type}."""


class NotANumber(errors.InvalidRequest):
    """The judge's {column!r} is {type}, no number: give its schema a property of type integer or number."""


class ColumnTaken(errors.InvalidRequest):
    """expand cannot put items into {column!r}: there is a column of that name. Give another `to`."""


class Transform(Protocol):
    """Changes a stream of rows. `columns` says, before anything runs, what comes out of what goes in."""

    dropped: int
    """Rows that were left out."""

    def columns(self, given: pa.Schema) -> pa.Schema: ...
    def apply(self, stream: Stream) -> Stream: ...


class Where:
    """Keeps the rows for which an SQL expression is true."""

    def __init__(self, expression: str, place: Callable[[int], str], on_fault: rows.OnFault) -> None:
        self._expression, self._place, self._on_fault = expression, place, on_fault
        self._where: where.Where | None = None
        self.dropped = 0

    def columns(self, given: pa.Schema) -> pa.Schema:
        self._where = where.Where(self._expression, given)
        return given

    def apply(self, stream: Stream) -> Stream:
        assert self._where is not None

        def counted() -> Stream:
            for each in stream:
                self.dropped += each.batch.num_rows
                yield each

        def failed(fault: rows.Fault) -> None:
            self.dropped -= 1  # it is told of as a fault
            self._on_fault(fault)

        for each in self._where.kept(counted(), self._place, failed):
            self.dropped -= each.batch.num_rows
            yield each


@dataclass
class Texts:
    """Keeps the rows whose text in a column passes filters (`quality.Filters`)."""

    column: str
    filters: quality.Filters
    dropped: int = 0

    def columns(self, given: pa.Schema) -> pa.Schema:
        check_text(given, self.column, "filter")
        return given

    def apply(self, stream: Stream) -> Stream:
        for each in stream:
            texts = each.batch[self.column].to_pylist()
            yield from _kept(self, each, [self.filters.reason(text or "") is None for text in texts])


@dataclass
class Distinct:
    """Keeps the first of rows whose texts in a column are the same, or with `threshold` nearly the same.

    While it is entered it knows all streams that it has seen.
    """

    column: str
    threshold: float | None
    directory: Path
    dropped: int = 0
    _seen: near.Exact | near.Near | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        least = self.threshold
        self._seen = near.Exact(self.directory) if least is None else near.Near(self.directory, least)
        return self

    def __exit__(self, *_: object) -> None:
        if self._seen is not None:
            self._seen.close()
            self._seen = None

    def columns(self, given: pa.Schema) -> pa.Schema:
        check_text(given, self.column, "dedupe")
        return given

    def apply(self, stream: Stream) -> Stream:
        assert self._seen is not None
        for each in stream:
            texts = each.batch[self.column].to_pylist()
            yield from _kept(self, each, [text is None or self._seen.is_new(text) for text in texts])


@dataclass
class Expand:
    """Makes a row of each item of a list; a row whose list is empty or null goes."""

    column: str
    to: str
    dropped: int = 0

    def columns(self, given: pa.Schema) -> pa.Schema:
        kind = _type(given, self.column)
        if not any(is_list(kind) for is_list in _LISTS):
            raise NotAList(column=self.column, type=kind)
        if self.to != self.column and self.to in given.names:
            raise ColumnTaken(column=self.to)
        return given.set(given.get_field_index(self.column), pa.field(self.to, kind.value_type))

    def apply(self, stream: Stream) -> Stream:
        for each in stream:
            lists = each.batch[self.column]
            parents, items = pc.list_parent_indices(lists), pc.list_flatten(lists)
            self.dropped += each.batch.num_rows - len(pc.unique(parents))
            # So many at a time: what is beside the list is copied for each of its items.
            for start in range(0, len(items), rows.BATCH_ROWS):
                yield self._expanded(each, *(part.slice(start, rows.BATCH_ROWS) for part in (parents, items)))

    def _expanded(self, each: Rows, parents: pa.Array, items: pa.Array) -> Rows:
        names, schema = each.batch.schema.names, self.columns(each.batch.schema)
        columns = [items if name == self.column else each.batch[name].take(parents) for name in names]
        return Rows(each.numbers.take(parents), pa.RecordBatch.from_arrays(columns, schema=schema))


@dataclass
class Best:
    """Keeps of the samples of a row the one with the highest score, the first of equal ones.

    `least`: what scores less goes, whatever its neighbours have. Rows without a score go.
    """

    column: str
    one: bool
    least: float | None = None
    dropped: int = 0
    _held: Rows | None = field(default=None, repr=False)

    def columns(self, given: pa.Schema) -> pa.Schema:
        kind = _type(given, self.column)
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise NotANumber(column=self.column, type=kind)
        return given

    def apply(self, stream: Stream) -> Stream:
        for each in stream:
            scores = each.batch[self.column].to_pylist()
            keep = [score is not None and (self.least is None or score >= self.least) for score in scores]
            for some in _kept(self, each, keep):
                yield from self._best(some) if self.one else [some]
        if self._held is not None:
            yield self._held
            self._held = None

    def _best(self, some: Rows) -> Stream:
        """Give the best of each number; the last one is held back, since more of it may come."""
        both = some if self._held is None else _joined(self._held, some)
        numbers, scores = _groups(both), both.batch[self.column].to_pylist()
        best: list[int] = []
        for at, number in enumerate(numbers):
            if best and numbers[best[-1]] == number:
                if scores[at] > scores[best[-1]]:
                    best[-1] = at
            else:
                best.append(at)
        self.dropped += len(numbers) - len(best)
        chosen = _taken(both, best)
        self._held = _taken(chosen, [len(best) - 1])
        if len(best) > 1:
            yield _taken(chosen, list(range(len(best) - 1)))


def check_text(given: pa.Schema, column: str, step: str) -> None:
    """Raise NotText or MissingColumn for a column that holds no text."""
    kind = _type(given, column)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise NotText(step=step, column=column, type=kind)


def _type(given: pa.Schema, column: str) -> pa.DataType:
    if column not in given.names:
        raise input_errors.missing_column(column, given.names)
    return given.field(column).type


def _kept(step: Transform, each: Rows, keep: list[bool]) -> Stream:
    step.dropped += keep.count(False)
    if any(keep):
        mask = pa.array(keep)
        yield each if all(keep) else Rows(each.numbers.filter(mask), each.batch.filter(mask))


def _taken(some: Rows, places: list[int]) -> Rows:
    at = pa.array(places, pa.int64())
    return Rows(some.numbers.take(at), some.batch.take(at))


def _groups(some: Rows) -> list[int]:
    """Return what the samples of a row have in common, and others have not."""
    sampled = shape.GROUP in some.batch.schema.names
    found: list[int] = (some.batch[shape.GROUP] if sampled else some.numbers).to_pylist()
    return found


def _joined(one: Rows, other: Rows) -> Rows:
    table = pa.Table.from_batches([one.batch, other.batch]).combine_chunks()
    return Rows(pa.concat_arrays([one.numbers, other.numbers]), table.to_batches()[0])
