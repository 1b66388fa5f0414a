"""Rows in the order of some columns, however many: DuckDB sorts them, on disk if need be."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from jobs.dataset import input_errors, rows

_NUMBER = "number"
_MEMORY = "256MB"


def ordered(
    batches: Iterator[rows.Rows], schema: pa.Schema, by: Sequence[str], scratch: Path | None
) -> Iterator[rows.Rows]:
    """Yield all rows in ascending order of columns, nulls last, equal ones in the order of the input.

    At most 256 MB are held in memory, the rest in files below `scratch`. Raises SortRefused.
    """
    with tempfile.TemporaryDirectory(prefix="longhaul-sort-", dir=scratch) as directory:
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": "1",
            "memory_limit": _MEMORY,
            "temp_directory": directory,
        }
        with duckdb.connect(":memory:", config=config) as db:
            yield from _sorted(db, batches, schema, by)


def _sorted(
    db: Any, batches: Iterator[rows.Rows], schema: pa.Schema, by: Sequence[str]
) -> Iterator[rows.Rows]:
    # Names of our own: to DuckDB two that differ in capitals are one.
    names = [f"c{at}" for at in range(len(schema))]
    numbered = pa.schema([*zip(names, schema.types, strict=True), (_NUMBER, pa.int64())])
    failed: list[Exception] = []
    db.register("rows", pa.RecordBatchReader.from_batches(numbered, _with_numbers(batches, numbered, failed)))
    keys = ", ".join([*(f"{names[schema.get_field_index(name)]} NULLS LAST" for name in by), _NUMBER])
    try:
        for batch in db.sql(f"SELECT * FROM rows ORDER BY {keys}").to_arrow_reader(rows.BATCH_ROWS):
            yield rows.Rows(batch.column(_NUMBER), _back(batch, schema))
    except (duckdb.Error, pa.ArrowException) as error:
        if failed:
            raise failed[0] from None
        raise input_errors.SortRefused(columns=", ".join(by), reason=error) from None


def _with_numbers(
    batches: Iterator[rows.Rows], schema: pa.Schema, failed: list[Exception]
) -> Iterator[pa.RecordBatch]:
    try:
        for each in batches:
            yield pa.RecordBatch.from_arrays([*each.batch.columns, each.numbers], schema=schema)
    except Exception as error:  # DuckDB would make one of its own of it
        failed.append(error)
        raise


def _back(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns with the types they had."""
    columns = [batch.column(at).cast(field.type) for at, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
