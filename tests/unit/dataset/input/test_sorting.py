import datetime
import random
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.dataset.input import rows, sorting, source
from tests.unit.dataset.reading import read


def test_equal_rows_keep_the_order_of_the_input_and_null_comes_last() -> None:
    table = pa.table({"k": ["b", None, "a", "b", "a"], "v": range(5)})
    numbers, found, _ = read(table, columns=["v"], sort_by=["k"])
    assert numbers == [2, 4, 0, 3, 1]
    assert found == [{"v": number} for number in numbers]


def test_several_columns_sort_one_after_the_other() -> None:
    table = pa.table({"a": [2, 1, 2, 1], "b": [1.5, 2.5, float("nan"), 0.5]})
    assert read(table, sort_by=["a", "b"])[0] == [3, 1, 0, 2]


@pytest.mark.parametrize(
    "values",
    [
        [True, False, None],
        [b"b", b"a", None],
        [{"k": 2}, {"k": 1}, None],
        [[2], [1], None],
        [datetime.datetime(2024, 1, 2), datetime.datetime(2024, 1, 1), None],
        [datetime.date(2024, 1, 2), datetime.date(2024, 1, 1), None],
        [datetime.time(2), datetime.time(1), None],
        [datetime.timedelta(2), datetime.timedelta(1), None],
        pa.array([2000001, 1000001, None], pa.timestamp("ns")),
        [float("nan"), 1.0, None],
    ],
)
def test_columns_of_any_type_can_be_sorted_by_and_survive(values: object) -> None:
    table = pa.table({"v": values})
    (found,) = source.open_source(table, sort_by=["v"]).rows()
    assert found.numbers.to_pylist() == [1, 0, 2]
    assert str(found.batch.column("v")) == str(table["v"].combine_chunks().take(pa.array([1, 0, 2])))


@pytest.mark.parametrize("most_runs", [2, 3, 64])
def test_what_is_larger_than_a_run_is_sorted_by_merging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_runs: int
) -> None:
    monkeypatch.setattr(sorting, "RUN_ROWS", 2000)
    monkeypatch.setattr(sorting, "PIECE_BYTES", 5000)
    monkeypatch.setattr(sorting, "MOST_RUNS", most_runs)
    chance = random.Random(7)
    keys = [chance.choice([None, *"abcdefgh"]) for _ in range(20_000)]
    table = pa.table({"k": keys, "m": [{"n": at, "l": [str(at)] * (at % 3)} for at in range(20_000)]})
    expected = sorted(range(20_000), key=lambda at: (keys[at] is None, keys[at] or "", at))
    numbers, found, _ = read(table, sort_by=["k"], scratch=tmp_path)
    assert numbers == expected
    assert found == table.take(expected).to_pylist()
    assert not list(tmp_path.iterdir())


def test_large_rows_come_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BATCH_BYTES", 1 << 20)
    table = pa.table({"k": range(60, 0, -1), "text": ["x" * 200_000] * 60})
    batches = [each.batch for each in source.open_source(table, sort_by=["k"], scratch=tmp_path).rows()]
    assert sum(batch.num_rows for batch in batches) == 60
    assert max(batch.num_rows for batch in batches) <= 6


def test_nothing_is_left_when_reading_stops_in_the_middle(tmp_path: Path) -> None:
    reading = source.open_source(pa.table({"k": range(5000)}), sort_by=["k"], scratch=tmp_path).rows()
    next(reading)
    assert list(tmp_path.iterdir())
    del reading
    assert not list(tmp_path.iterdir())


def test_limit_takes_the_first_rows_of_the_input_and_then_they_are_sorted() -> None:
    assert read(pa.table({"k": [5, 4, 3, 2, 1]}), sort_by=["k"], limit=2)[0] == [1, 0]
