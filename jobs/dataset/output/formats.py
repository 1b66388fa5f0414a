"""One shard in each format: batches go in, a file comes out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from pyarrow import parquet

from jobs import errors
from jobs.dataset.output import chat, json_rows

GROUP_BYTES = 32 << 20
"""Bytes in memory that become one row group, which is the least that a reader of Parquet reads."""
_BATCH_BYTES = 4096
"""What a batch costs in memory besides its values."""

FORMATS = {"parquet": "parquet", "jsonl": "jsonl", "messages": "jsonl", "sharegpt": "jsonl"}
"""The formats, and the suffixes of their files."""


class UnknownFormat(errors.LonghaulError):
    """There is no format {format!r}: choose one of {formats}."""


class UnfitColumns(errors.LonghaulError):
    """The format {format} cannot hold these columns: {reason}."""


class Shard(Protocol):
    """A file that takes batches. `size`: bytes written, and a guess of those still in memory."""

    size: int

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""

    def close(self) -> None:
        """Write what is in memory and close the file."""


class Parquet:
    """A Parquet file, compressed with zstd, in row groups of bounded bytes."""

    def __init__(self, path: Path, schema: pa.Schema, group_bytes: int = GROUP_BYTES) -> None:
        self.size = 0
        self._file = pa.OSFile(str(path), "wb")
        self._schema, self._group_bytes = schema, group_bytes
        self._writer = parquet.ParquetWriter(self._file, schema, compression="zstd")
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._bytes += batch.nbytes + _BATCH_BYTES
        if self._bytes >= self._group_bytes:
            self._flush()

    def close(self) -> None:
        try:
            self._flush()
            self._writer.close()
        finally:
            self._file.close()

    def _flush(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting, self._schema)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._waiting, self._bytes = [], 0
        self.size = self._file.tell()


class JsonLines:
    """A file with one JSON object a line; `form`: which conversation a row becomes, if it does."""

    def __init__(self, path: Path, form: str) -> None:
        self.size = 0
        self._file = path.open("wb")
        self._form = form

    def write(self, batch: pa.RecordBatch) -> None:
        for line in self._lines(batch):
            self.size += self._file.write(line)

    def close(self) -> None:
        self._file.close()

    def _lines(self, batch: pa.RecordBatch) -> Iterable[bytes]:
        if self._form not in chat.FORMS:
            return json_rows.lines(batch)
        rows = json_rows.rows(chat.columns(batch))
        return map(json_rows.encoded, map(chat.FORMS[self._form], rows))


def open_shard(path: Path, schema: pa.Schema, format: str, group_bytes: int = GROUP_BYTES) -> Shard:
    """Open a new shard of a format that `check` has accepted."""
    return Parquet(path, schema, group_bytes) if format == "parquet" else JsonLines(path, format)


def check(schema: pa.Schema, format: str) -> None:
    """Raise UnknownFormat or UnfitColumns for what could not be written, before any work is done for it."""
    if format not in FORMATS:
        raise UnknownFormat(format=format, formats=", ".join(FORMATS))
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise UnfitColumns(format=format, reason=f"{', '.join(twice)} would be there twice")
    if format in chat.FORMS:
        _check_conversation(schema, format)
    elif format == "parquet":
        for field in schema:
            _check_parquet(field)


def _check_conversation(schema: pa.Schema, format: str) -> None:
    missing = [name for name in chat.COLUMNS if name not in schema.names]
    if missing:
        raise UnfitColumns(format=format, reason=f"it is made of messages and output, without {missing}")


def _check_parquet(field: pa.Field) -> None:
    schema = pa.schema([field])
    try:
        parquet.write_table(schema.empty_table(), pa.BufferOutputStream())
    except (pa.ArrowException, OSError) as error:
        reason = (
            f"{field.name!r} is {field.type}, {error}. Leave it out with --columns, or choose --format jsonl"
        )
        raise UnfitColumns(format="parquet", reason=reason) from None
