from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import profile, results
from jobs.errors import ParameterRefused
from jobs.records import ResultRow


def _row(row: int = 0, **changed: Any) -> ResultRow:
    metrics: dict[str, Any] = {
        "queue_seconds": 1.0,
        "ttft_seconds": 0.5,
        "inter_token_seconds": None,
        "e2e_seconds": 3.0,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 8,
        "started_at": 1000.0,
        "finished_at": 1002.0,
        "deduplicated_from": None,
    }
    return ResultRow(row, False, {"custom_id": f"c{row}"}, metrics | changed)


def _shown(*rows: ResultRow) -> dict[str, Any]:
    gathered = profile.Profile()
    for row in rows:
        gathered.add(row)
    return gathered.shown()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80))
def test_every_value_lies_between_the_edges_of_a_bar_that_counts_it(values: list[float]) -> None:
    histogram = profile.Histogram()
    for value in values:
        histogram.add(value)
    shown = histogram.shown()
    assert shown is not None
    edges, counts = shown["edges"], shown["counts"]
    assert len(edges) == len(counts) + 1
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        inside = sum(low * (1 + 1e-6) < value <= high * (1 + 1e-6) for value in values)
        assert count == inside or low < 0.001
    assert sum(counts) == len(values)
    assert edges[0] <= shown["p50"] <= shown["p90"] <= shown["p99"] <= edges[-1]


def test_an_estimated_percentile_is_within_a_bar_of_the_true_one() -> None:
    histogram = profile.Histogram()
    for value in range(1, 1001):
        histogram.add(value)
    shown = histogram.shown()
    assert shown is not None
    for percent in profile.PERCENTILES:
        assert shown[f"p{percent}"] == pytest.approx(percent * 10, rel=0.1)


def test_output_is_spread_over_the_time_a_request_ran() -> None:
    line = _shown(_row(), _row(1, started_at=1001.0))["timeline"]
    assert (line["began_at"], line["bin_seconds"], line["longest_seconds"]) == (1000.0, 0.25, 2.0)
    assert line["running"] == [1.0] * 4 + [2.0] * 4 + [0.0]
    assert line["output_tokens"] == [1.0] * 4 + [3.0] * 4 + [0.0]
    assert sum(line["requests"]) == 2


@given(st.lists(st.tuples(st.floats(0, 90_000), st.floats(0, 5000)), min_size=1, max_size=30))
def test_a_timeline_stays_small_and_loses_nothing(spans: list[tuple[float, float]]) -> None:
    rows = [_row(i, started_at=at, finished_at=at + long) for i, (at, long) in enumerate(spans)]
    line = _shown(*rows)["timeline"]
    assert all(len(line[name]) <= 241 for name in profile.Timeline.columns)
    assert sum(line["output_tokens"]) == pytest.approx(8 * len(spans), abs=0.2)
    assert sum(line["cached_tokens"]) == 4 * len(spans)
    ran = sum(line["running"]) * line["bin_seconds"]
    assert ran == pytest.approx(sum(long for _, long in spans), rel=0.01, abs=0.2 * line["bin_seconds"])


def test_rows_that_anothers_answer_served_count_but_have_no_times() -> None:
    shown = _shown(_row(), _row(1, deduplicated_from="c0"))
    assert shown["rows"] == 2
    assert sum(shown["latency"]["e2e_seconds"]["counts"]) == 1
    assert shown["latency"]["inter_token_seconds"] is None


def test_errors_are_counted_by_code_and_the_first_listed_in_order() -> None:
    refused = results.refused("batch_x", 7, "seven", ParameterRefused("No.", param="n"))
    lost = ResultRow(2, True, results.never("batch_x", 2, "two", "worker_lost", "Gone."), None)
    errors = _shown(refused, lost)["errors"]
    assert errors["by_code"] == {ParameterRefused.code: 1, "worker_lost": 1}
    assert [(one["request"], one["custom_id"]) for one in errors["first"]] == [(3, "two"), (8, "seven")]


def test_nothing_is_known_of_nothing() -> None:
    shown = _shown()
    assert shown["timeline"] is None
    assert not any(shown["latency"].values())
