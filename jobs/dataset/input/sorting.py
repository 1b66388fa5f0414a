"""Rows in the order of some columns, however many and however large: sorted runs on disk, then merged.

Not by DuckDB: that moves 2,048 rows at a time, which is more than its memory when rows are documents.
"""

import heapq
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from pyarrow import ipc

from jobs.dataset.input import rows

RUN_ROWS = 65_536
RUN_BYTES = 32 << 20
MOST_RUNS = 64
"""So many runs are merged at once; of each a piece of PIECE_BYTES is in memory."""
PIECE_BYTES = 128 << 10
_NUMBER = "number"

Keyed = tuple[tuple[Any, ...], pa.RecordBatch, int, float]
"""The sort key of a row, unique by its number; a batch; the row's index in that; the row's bytes, about."""


def ordered(
    batches: Iterator[rows.Rows], schema: pa.Schema, by: Sequence[str], scratch: Path | None
) -> Iterator[rows.Rows]:
    """Yield all rows in ascending order of columns, equal ones in the order of the input.

    Null comes last, NaN before it; lists and structs are ordered as JSON text. What does not fit into about
    100 MB is in files below `scratch`.
    """
    keys = [schema.get_field_index(name) for name in by]
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="longhaul-sort-", dir=scratch) as directory:
        names = (Path(directory) / f"{number}.arrow" for number in count())
        runs = [_written(run, next(names)) for run in _runs(batches, keys)]
        while len(runs) > MOST_RUNS:
            runs = [*runs[MOST_RUNS:], _written(_merged(runs[:MOST_RUNS], keys), next(names))]
        for batch in _merged(runs, keys):
            yield rows.Rows(batch.column(len(schema)), _with_schema(batch, schema))


def _runs(batches: Iterator[rows.Rows], keys: list[int]) -> Iterator[Iterator[pa.RecordBatch]]:
    """Yield sorted runs, each as batches."""
    some: list[pa.RecordBatch] = []
    length = held = 0
    for each in batches:
        some.append(each.batch.append_column(_NUMBER, each.numbers))
        length, held = length + each.batch.num_rows, held + each.batch.nbytes
        if length >= RUN_ROWS or held >= RUN_BYTES:
            yield _sorted(some, keys)
            some, length, held = [], 0, 0
    if some:
        yield _sorted(some, keys)


def _sorted(some: list[pa.RecordBatch], keys: list[int]) -> Iterator[pa.RecordBatch]:
    whole = pa.concat_batches(some)
    order = [index for *_, index in sorted(_keyed(whole, keys))]
    for start in range(0, len(order), rows.BATCH_ROWS):
        yield whole.take(pa.array(order[start : start + rows.BATCH_ROWS]))


def _merged(runs: list[Path], keys: list[int]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of sorted runs in order; the runs are removed."""
    following = heapq.merge(*(_read(run, keys) for run in runs))
    while some := list(_fitting(following)):
        yield _gathered(some)
    for run in runs:
        run.unlink()


def _fitting(following: Iterator[Keyed]) -> Iterator[Keyed]:
    held = 0.0
    for keyed in islice(following, rows.BATCH_ROWS):
        yield keyed
        held += keyed[-1]
        if held >= rows.BATCH_BYTES:
            return


def _gathered(some: list[Keyed]) -> pa.RecordBatch:
    """Return rows of several batches as one; what is used of each is one piece of it, since it is sorted."""
    firsts: dict[int, tuple[pa.RecordBatch, int, int]] = {}
    for _, batch, index, _ in some:
        _, first, used = firsts.get(id(batch), (batch, index, 0))
        firsts[id(batch)] = (batch, first, used + 1)
    offsets, offset = {}, 0
    for key, (_, first, used) in firsts.items():
        offsets[key] = offset - first
        offset += used
    pieces = [batch.slice(first, used) for batch, first, used in firsts.values()]
    return pa.concat_batches(pieces).take(
        pa.array([offsets[id(batch)] + index for _, batch, index, _ in some])
    )


def _written(run: Iterator[pa.RecordBatch], path: Path) -> Path:
    first = next(run)
    with ipc.new_file(path, first.schema) as out:
        for batch in chain([first], run):
            size = rows.fitting(batch, PIECE_BYTES)
            for start in range(0, batch.num_rows, size):
                out.write_batch(batch.slice(start, size))
    return path


def _read(run: Path, keys: list[int]) -> Iterator[Keyed]:
    with pa.OSFile(str(run)) as file, ipc.open_file(file) as opened:
        for at in range(opened.num_record_batches):
            batch = opened.get_batch(at)
            size = batch.nbytes / batch.num_rows
            for key, index in _keyed(batch, keys):
                yield key, batch, index, size


def _keyed(batch: pa.RecordBatch, keys: list[int]) -> Iterator[tuple[tuple[Any, ...], int]]:
    columns = [_comparable(batch.column(at)) for at in keys]
    return zip(zip(*columns, batch.column(batch.num_columns - 1).to_pylist(), strict=True), count())


def _comparable(column: pa.Array) -> list[tuple[Any, ...]]:
    """Return values that can be compared with one another: null is the largest, NaN comes before it."""
    if pa.types.is_temporal(column.type) and not pa.types.is_interval(
        column.type
    ):  # Python has no nanoseconds
        column = column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
    values = column.to_pylist()
    if pa.types.is_nested(column.type):
        values = [value if value is None else orjson.dumps(value, default=str) for value in values]
    return [(2,) if value is None else (0, value) if value == value else (1,) for value in values]


def _with_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.columns[: len(schema)], schema=schema)
