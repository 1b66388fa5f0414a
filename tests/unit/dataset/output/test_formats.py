import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from jobs.dataset.output import chat, formats, json_rows, writing

DAY = datetime.date(2026, 11, 30)
MOMENT = datetime.datetime(2026, 11, 30, 12, 0, 1, 500, tzinfo=datetime.UTC)


def written(directory: Path, batch: pa.RecordBatch, format: str) -> list[Any]:
    with writing.Writer(directory, batch.schema, format) as writer:
        writer.add(batch)
        (path,) = writer.publish()
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_nested_values_stay_nested_and_text_stays_text(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "meta": {"tags": ["a", "ü\u2028\x85\n"], "deep": [{"x": None}]}},
        {"id": 2, "meta": None},
    ]
    assert written(tmp_path, pa.RecordBatch.from_pylist(rows), "jsonl") == rows


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        (float("nan"), pa.float64(), None),
        (float("-inf"), pa.float32(), None),
        (0.5, pa.float16(), 0.5),
        (Decimal("1.50"), pa.decimal128(5, 2), "1.50"),
        (b"\xff\x00", pa.binary(), "/wA="),
        (DAY, pa.date32(), "2026-11-30"),
        (MOMENT, pa.timestamp("ns", "UTC"), "2026-11-30 12:00:01.000500000Z"),
        (datetime.timedelta(seconds=2), pa.duration("ms"), 2000),
        (2**63 - 1, pa.int64(), 2**63 - 1),
        ("a", pa.dictionary(pa.int32(), pa.string()), "a"),
        ([1], pa.large_list(pa.int8()), [1]),
        ([1, 2], pa.list_(pa.int8(), 2), [1, 2]),
        ({"day": DAY}, pa.struct([("day", pa.date32())]), {"day": "2026-11-30"}),
        ([DAY], pa.list_(pa.date32()), ["2026-11-30"]),
        ([("k", 1)], pa.map_(pa.string(), pa.int8()), [["k", 1]]),
        (None, pa.null(), None),
    ],
)
def test_a_value_of_each_type_has_one_form_in_json(value: Any, kind: pa.DataType, shown: Any) -> None:
    batch = pa.record_batch([pa.array([value], kind)], ["value"])
    (line,) = json_rows.lines(batch)
    assert json.loads(line) == {"value": shown}
    assert b"NaN" not in line


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def conversation(messages: list[dict[str, str]] | None, output: str | None) -> pa.RecordBatch:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    return pa.record_batch(
        {"id": [1], "messages": pa.array([messages], kind), "output": pa.array([output], pa.string())}
    )


def test_messages_are_the_prompts_and_then_the_output_and_nothing_else(tmp_path: Path) -> None:
    assert written(tmp_path, conversation(TURNS, "Hello"), "messages") == [
        {"messages": [*TURNS, {"role": "assistant", "content": "Hello"}]}
    ]


def test_sharegpt_names_the_speakers_in_its_own_way(tmp_path: Path) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "Yes?"}, {"role": "tool", "content": "7"}]
    (row,) = written(tmp_path, conversation(turns, "Hello"), "sharegpt")
    assert [turn["from"] for turn in row["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]
    assert row["conversations"][-1]["value"] == "Hello"


def test_a_row_without_an_output_is_no_conversation(tmp_path: Path) -> None:
    with pytest.raises(chat.NoConversation):
        written(tmp_path, conversation(TURNS, None), "messages")
    assert list(tmp_path.iterdir()) == []


def test_columns_that_make_no_conversation_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(formats.UnfitColumns, match="messages"):
        writing.Writer(tmp_path / "out", pa.schema([("output", pa.string())]), "messages")
    assert not (tmp_path / "out").exists()


def test_an_unknown_format_is_named_with_those_there_are() -> None:
    with pytest.raises(formats.UnknownFormat, match=r"'csv'.*parquet, jsonl, messages, sharegpt"):
        formats.check(pa.schema([]), "csv")


def test_a_column_that_parquet_cannot_hold_is_named_at_once() -> None:
    schema = pa.schema([("id", pa.int8()), ("empty", pa.struct([]))])
    with pytest.raises(formats.UnfitColumns, match=r"'empty' .*--columns"):
        formats.check(schema, "parquet")
    formats.check(schema, "jsonl")


def test_a_name_that_is_there_twice_is_refused() -> None:
    with pytest.raises(formats.UnfitColumns, match="output would be there twice"):
        formats.check(pa.schema([("output", pa.int8()), ("output", pa.int8())]), "jsonl")


def test_many_tiny_batches_do_not_pile_up_in_memory(tmp_path: Path) -> None:
    one = pa.record_batch({"id": [1]})
    shard = formats.Parquet(tmp_path / "one.parquet", one.schema, group_bytes=100 * 5_000)
    for _ in range(1_000):
        shard.write(one)
    shard.close()
    assert parquet.read_metadata(tmp_path / "one.parquet").num_row_groups >= 8
