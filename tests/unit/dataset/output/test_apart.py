"""What is kept apart: each row once, with where it is and why."""

import datetime
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq

from jobs.dataset.input import rows
from jobs.dataset.output import apart


def fault(row: int) -> apart.Fault:
    return apart.Fault(row, f"line {row}", 0, "s", "c", "é")


def invalid(row: int, given: dict[str, Any]) -> apart.Invalid:
    return apart.Invalid(row, f"line {row}", 1, "s", "{", "not JSON", given)


def test_faults_come_into_their_file_in_their_order(tmp_path: Path) -> None:
    with apart.Apart(tmp_path) as aside:
        for row in range(2500):
            aside.fault(fault(row))
        (file,) = aside.publish()
    assert (file.name, file.rows) == ("errors.parquet", 2500)
    found = pq.read_table(tmp_path / "errors.parquet").to_pylist()
    assert [row["row"] for row in found] == list(range(2500))
    assert found[7] == {
        "row": 7, "place": "line 7", "sample": 0, "step": "s", "code": "c", "message": "é",
    }  # fmt: skip
    assert aside.counts == {"errors": 2500, "invalid": 0}


def test_invalid_outputs_have_the_row_they_are_of_as_json(tmp_path: Path) -> None:
    given = {"text": "ü", "day": datetime.date(2024, 1, 2), "blob": b"\xff", "none": None, "x": [{"y": 1.5}]}
    with apart.Apart(tmp_path) as aside:
        aside.invalid(invalid(3, given))
        assert [file.name for file in aside.publish()] == ["invalid.parquet"]
    (row,) = pq.read_table(tmp_path / "invalid.parquet").to_pylist()
    assert orjson.loads(row.pop("input")) == given | {"day": "2024-01-02", "blob": "/w=="}
    assert row == {"row": 3, "place": "line 3", "sample": 1, "step": "s", "output": "{", "error": "not JSON"}


def test_a_record_that_could_not_be_read_is_a_fault_of_the_reading(tmp_path: Path) -> None:
    with apart.Apart(tmp_path) as aside:
        aside.unreadable_row(rows.Fault(5, "a.jsonl line 6", "not JSON"))
        aside.publish()
    (row,) = pq.read_table(tmp_path / "errors.parquet").to_pylist()
    assert (row["row"], row["place"], row["step"], row["code"]) == (5, "a.jsonl line 6", "read", "unreadable")
    assert aside.unreadable == 1


def test_there_are_no_files_of_nothing_and_none_of_an_earlier_run(tmp_path: Path) -> None:
    with apart.Apart(tmp_path) as first:
        first.fault(fault(1))
        first.publish()
    with apart.Apart(tmp_path) as second:
        assert second.publish() == ()
    assert list(tmp_path.glob("*.parquet")) == []


def test_a_run_that_is_broken_off_leaves_the_files_of_the_earlier_one(tmp_path: Path) -> None:
    with apart.Apart(tmp_path) as first:
        first.fault(fault(1))
        first.publish()
    with apart.Apart(tmp_path) as second:
        for row in range(5000):
            second.fault(fault(row))
    assert [path.name for path in tmp_path.iterdir()] == ["errors.parquet"]
    assert pq.read_table(tmp_path / "errors.parquet").num_rows == 1
