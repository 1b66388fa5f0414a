"""Parquet files, Arrow files and streams, and tables in memory."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc, parquet

from jobs.dataset.input import input_errors, places, rows, text_lines

_BUFFER_BYTES = 1 << 20
_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


class Table:
    """Reads a table in memory."""

    shown = "the table"

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.count = table.num_rows
        self.schema = _plain(table.schema, self.shown)

    def read(self, schema: pa.Schema, start: int, on_fault: rows.OnFault) -> Generator[rows.Rows, None, int]:
        with _reading(self.shown):
            return (yield from _numbered(self._table.to_batches(rows.BATCH_ROWS), schema, start))

    def place(self, position: int) -> str:
        return f"row {position}"


class Arrow:
    """Reads an Arrow file: one with a footer, or a stream, such as Hugging Face's `datasets` writes."""

    def __init__(self, file: places.File) -> None:
        self.shown = file.shown
        self._file = file
        _check_start(file)
        with _reading(self.shown), self._opened(mapped=True) as batches:
            self.schema = _plain(batches.schema, self.shown)
            self.count = sum(batch.num_rows for batch in batches)

    def read(self, schema: pa.Schema, start: int, on_fault: rows.OnFault) -> Generator[rows.Rows, None, int]:
        with _reading(self.shown), self._opened() as batches:
            return (yield from _numbered(batches, schema, start))

    def place(self, position: int) -> str:
        return f"row {position}"

    @contextmanager
    def _opened(self, mapped: bool = False) -> Iterator[Any]:
        local = mapped and not self._file.shown.startswith("s3://")
        file = (
            pa.memory_map(self._file.path)
            if local
            else self._file.filesystem.open_input_file(self._file.path)
        )
        with file:
            if file.read(6) == b"ARROW1":
                opened = ipc.open_file(file)
                yield _Batches(opened.schema, map(opened.get_batch, range(opened.num_record_batches)))
            else:
                file.seek(0)
                yield ipc.open_stream(file)


class _Batches:
    def __init__(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        self.schema, self._batches = schema, batches

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return iter(self._batches)


class Parquet:
    """Reads a Parquet file, a few rows at a time, however large its row groups are."""

    def __init__(self, file: places.File) -> None:
        self.shown = file.shown
        self._file = file
        _check_start(file)
        with _reading(self.shown), self._opened() as opened:
            self.schema = _plain(opened.schema_arrow, self.shown)
            self.count = opened.metadata.num_rows

    def read(self, schema: pa.Schema, start: int, on_fault: rows.OnFault) -> Generator[rows.Rows, None, int]:
        columns = [name for name in schema.names if name in self.schema.names]
        with _reading(self.shown), self._opened() as opened:
            batches = opened.iter_batches(_batch_rows(opened.metadata), columns=columns, use_threads=False)
            return (yield from _numbered(batches, schema, start))

    def place(self, position: int) -> str:
        return f"row {position}"

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        with (
            self._file.filesystem.open_input_file(self._file.path) as file,
            parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES) as opened,
        ):
            yield opened


def _batch_rows(metadata: Any) -> int:
    """Return how many rows hold about BATCH_BYTES, as far as the footer tells."""
    held = max((metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups)), default=0)
    most = max((metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)), default=1)
    return max(1, min(rows.BATCH_ROWS, rows.BATCH_BYTES * most // max(1, held)))


def _check_start(file: places.File) -> None:
    with _reading(file.shown), file.filesystem.open_input_stream(file.path) as opened:
        text_lines.check_pointer(file, opened.read(64))


@contextmanager
def _reading(shown: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise input_errors.InputUnreadable(where=shown, reason=error) from None


def _plain(schema: pa.Schema, shown: str) -> pa.Schema:
    """Return a schema without dictionaries, and without what its writer noted in it."""
    for name in schema.names:
        if len(schema.get_all_field_indices(name)) > 1:
            raise input_errors.ColumnTwice(where=shown, name=name)
    fields = [(field.name, _decoded(field.type)) for field in schema]
    return pa.schema(fields)


def _decoded(type: pa.DataType) -> pa.DataType:
    """Return the type with plain values in place of dictionaries, runs and views, which few can use."""
    if pa.types.is_dictionary(type) or pa.types.is_run_end_encoded(type):
        return _decoded(type.value_type)
    if type in _VIEWS:
        return _VIEWS[type]
    if pa.types.is_list(type):
        return pa.list_(_decoded(type.value_type))
    if pa.types.is_large_list(type):
        return pa.large_list(_decoded(type.value_type))
    if pa.types.is_struct(type):
        return pa.struct([(field.name, _decoded(field.type)) for field in type])
    return type


def _numbered(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, start: int
) -> Generator[rows.Rows, None, int]:
    for each in batches:
        large = _shaped(each, schema)
        size = rows.fitting(large)
        for offset in range(0, large.num_rows, size):
            batch = large.slice(offset, size)
            yield rows.Rows(rows.numbers(range(start, start + batch.num_rows)), batch)
            start += batch.num_rows
    return start


def _shaped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema; null where the batch has none."""
    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        if pa.types.is_run_end_encoded(column.type):
            column = pc.run_end_decode(column)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
