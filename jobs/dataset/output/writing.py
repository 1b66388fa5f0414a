"""Write rows as the shards of a dataset: DIRECTORY/data-00000.parquet and so on, in the order they come."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import Self

import pyarrow as pa

from jobs import errors
from jobs.dataset.output import formats, shards


class CannotWrite(errors.LonghaulError):
    """The dataset cannot be written to {directory}: {reason}. Make room there or choose another -o."""


class Writer:
    """Writes record batches as shards of a format into a directory; nothing appears there before `publish`.

    A shard ends with the rows that bring its file to `shard_bytes`, or at `shard_rows` exactly. With
    `sharded=False` there is one file, NAME.parquet or NAME.jsonl, and none when there are no rows.
    Memory: one row group. There must be one writer a name and directory at a time.
    Raises formats.UnknownFormat and UnfitColumns at once, CannotWrite for what the disk refuses.
    """

    def __init__(
        self,
        directory: Path,
        schema: pa.Schema,
        format: str = "parquet",
        *,
        name: str = "data",
        shard_bytes: int = 256 << 20,
        shard_rows: int = 1_000_000,
        sharded: bool = True,
    ) -> None:
        formats.check(schema, format)
        self.rows = 0
        self.files: tuple[shards.File, ...] = ()
        """What was published."""
        self._directory, self._schema, self._format, self._name = directory, schema, format, name
        self._shard_bytes, self._shard_rows, self._sharded = shard_bytes, shard_rows, sharded
        self._group_bytes = min(formats.GROUP_BYTES, shard_bytes)
        self._counts: list[int] = []
        self._shard: formats.Shard | None = None
        with self._told():
            self._place = shards.staging(directory, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows, which must have the writer's schema. Raises ValueError when they do not."""
        if not batch.schema.equals(self._schema):
            raise ValueError(f"The writer's columns are {self._schema}, not {batch.schema}")
        with self._told():
            for piece in _pieces(batch, self._group_bytes):
                self._add(piece)

    def publish(self) -> list[Path]:
        """Close the shards and put them in the place of all older ones of this name; return their paths."""
        with self._told():
            if self._shard is None and not self._counts and self._sharded:
                self._open()
            self._close()
            names = [self._named(index) for index in range(len(self._counts))]
            described = [
                shards.described(self._place / name, self._counts[i]) for i, name in enumerate(names)
            ]
            paths = shards.publish(self._place, self._directory, self._name, names)
        self.files = tuple(described)
        return paths

    def abandon(self) -> None:
        """Throw away what was not published."""
        with suppress(OSError, pa.ArrowException):
            self._close()
        rmtree(self._place, ignore_errors=True)

    def _add(self, batch: pa.RecordBatch) -> None:
        while batch.num_rows:
            shard = self._shard or self._open()
            room = self._shard_rows - self._counts[-1] if self._sharded else batch.num_rows
            taken = batch.slice(0, room)
            shard.write(taken)
            self._counts[-1] += taken.num_rows
            self.rows += taken.num_rows
            batch = batch.slice(taken.num_rows)
            if self._sharded and (self._counts[-1] >= self._shard_rows or shard.size >= self._shard_bytes):
                self._close()

    def _open(self) -> formats.Shard:
        path = self._place / self._named(len(self._counts))
        self._shard = formats.open_shard(path, self._schema, self._format, self._group_bytes)
        self._counts.append(0)
        return self._shard

    def _close(self) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.close()

    def _named(self, index: int) -> str:
        number = f"-{index:05d}" if self._sharded else ""
        return f"{self._name}{number}.{formats.FORMATS[self._format]}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CannotWrite(directory=self._directory, reason=error.strerror or error) from error


def _pieces(batch: pa.RecordBatch, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces of about `most_bytes`."""
    rows = max(1, batch.num_rows * most_bytes // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
