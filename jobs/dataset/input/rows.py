"""The vocabulary of the input: a batch of rows, a record that could not be read, and what reads them."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

BATCH_ROWS = 1000
BATCH_BYTES = 4 << 20


@dataclass(frozen=True)
class Rows:
    """Some rows: their numbers in the whole input, as read, before --where (int64), and their columns."""

    numbers: pa.Int64Array
    batch: pa.RecordBatch


@dataclass(frozen=True)
class Fault:
    """A record of the input that could not be read; `where` is its file and its place in that."""

    row: int
    where: str
    message: str


OnFault = Callable[[Fault], None]


class Reader(Protocol):
    """Reads one file, or one table in memory, from the start each time."""

    shown: str
    schema: pa.Schema
    count: int | None
    """How many rows it has; None: nobody knows yet."""

    def read(self, schema: pa.Schema, start: int, on_fault: OnFault) -> Generator[Rows, None, int]:
        """Yield rows with these columns, null where it has none, numbered from `start`; return the next."""

    def place(self, position: int) -> str:
        """Return where its row of this position (from 0) is, for a message."""


def numbers(values: Sequence[int]) -> pa.Int64Array:
    """Return row numbers as Arrow has them."""
    return pa.array(values, pa.int64())


def fitting(batch: pa.RecordBatch, held: int = BATCH_BYTES) -> int:
    """Return how many rows of a batch have about so many bytes: one at least, BATCH_ROWS at most."""
    rows: int = held * batch.num_rows // max(1, batch.nbytes)
    return max(1, min(BATCH_ROWS, rows))


def ignore(fault: Fault) -> None:
    """Do nothing about a record that cannot be read."""


def records(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as Python values, maps as dicts. Times lose their nanoseconds: Python has none."""
    schema = pa.schema([field.with_type(_micro(field.type)) for field in batch.schema])
    plain = batch if schema.equals(batch.schema) else batch.cast(schema, safe=False)
    found: list[dict[str, Any]] = plain.to_pylist(maps_as_pydicts="lossy")
    return found


def _micro(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_micro(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_micro(kind.key_type), _micro(kind.item_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_micro(kind.value_type)))
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_micro(kind.value_type)))
    return kind
