"""What was written, read back by libraries that people use."""

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyarrow import dataset, json

from jobs.dataset.output import writing

ROWS: list[dict[str, Any]] = [
    {
        "id": number,
        "meta": {"lang": "en", "tags": ["a"] * (number % 3)},
        "output": None if number == 3 else f"o\n{number}",
    }
    for number in range(25)
]


def write(directory: Path, format: str) -> list[str]:
    batch = pa.RecordBatch.from_pylist(ROWS)
    with writing.Writer(directory, batch.schema, format, shard_rows=10) as writer:
        writer.add(batch)
        paths = writer.publish()
    errors = pa.record_batch({"row": [1], "error": ["apart"]})
    with writing.Writer(directory, errors.schema, format, name="errors", sharded=False) as writer:
        writer.add(errors)
        writer.publish()
    return [str(path) for path in paths]


def test_arrow_reads_the_shards_as_one_dataset(tmp_path: Path) -> None:
    assert dataset.dataset(write(tmp_path, "parquet")).to_table().to_pylist() == ROWS


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_duckdb_reads_a_glob_of_them_in_order(tmp_path: Path, format: str) -> None:
    write(tmp_path, format)
    read = "read_parquet" if format == "parquet" else "read_ndjson"
    found = duckdb.sql(f"SELECT id, output, meta.lang FROM {read}('{tmp_path}/data-*')").fetchall()
    assert found == [(row["id"], row["output"], "en") for row in ROWS]


def test_arrow_reads_lines_of_json_with_their_types(tmp_path: Path) -> None:
    tables = [json.read_json(path) for path in write(tmp_path, "jsonl")]
    assert pa.concat_tables(tables).to_pylist() == ROWS
