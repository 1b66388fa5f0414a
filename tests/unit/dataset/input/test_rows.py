"""Rows as Python values."""

import datetime

import pyarrow as pa

from jobs.dataset.input import rows


def test_times_with_nanoseconds_become_times_of_python_at_any_depth() -> None:
    at = 1_700_000_000_000_001_999
    time = datetime.datetime(2023, 11, 14, 22, 13, 20, 1)
    stamp = pa.timestamp("ns")
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([at, None], stamp),
            pa.array([[at], None], pa.list_(stamp)),
            pa.array([{"at": at}, None], pa.struct([("at", stamp)])),
            pa.array([at, None], pa.timestamp("ns", "UTC")),
            pa.array([1999, None], pa.duration("ns")),
            pa.array([1999, None], pa.time64("ns")),
        ],
        names=list("abcdef"),
    )
    first, second = rows.records(batch)
    assert first == {
        "a": time,
        "b": [time],
        "c": {"at": time},
        "d": time.replace(tzinfo=datetime.UTC),
        "e": datetime.timedelta(microseconds=1),
        "f": datetime.time(microsecond=1),
    }
    assert set(second.values()) == {None}


def test_other_values_stay_as_they_are() -> None:
    given = {
        "a": [1.5, None],
        "b": ["é", ""],
        "c": [[1], None],
        "d": [{"x": True}, None],
        "e": [b"\xff", None],
    }
    batch = pa.RecordBatch.from_pydict(given)
    assert rows.records(batch) == batch.to_pylist()
    assert rows.records(batch.slice(1, 0)) == []
    assert rows.records(batch.select([])) == [{}, {}]


def test_maps_are_dicts_and_times_lose_their_nanoseconds_in_all_that_nests() -> None:
    at, kept = pa.array([1999], pa.timestamp("ns")), datetime.datetime(1970, 1, 1, microsecond=1)
    nested = {
        "map": pa.MapArray.from_arrays([0, 1], pa.array(["k"]), at),
        "large": pa.LargeListArray.from_arrays([0, 1], at),
        "fixed": pa.FixedSizeListArray.from_arrays(at, 1),
    }
    assert rows.records(pa.RecordBatch.from_pydict(nested)) == [
        {"map": {"k": kept}, "large": [kept], "fixed": [kept]}
    ]
