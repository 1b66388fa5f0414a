from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import summary
from jobs.records import Usage

COUNTS = {"total": 2, "completed": 2, "failed": 0}


def _metrics(**changed: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "queue_seconds": 1.0,
        "ttft_seconds": 0.5,
        "inter_token_seconds": 0.1,
        "e2e_seconds": 3.0,
        "started_at": 10.0,
        "finished_at": 12.0,
        "attempts": 0,
        "worker": "w1",
        "deduplicated_from": None,
    }
    return facts | changed


def _built(*entries: tuple[dict[str, Any], Usage], cost: float | None = None) -> dict[str, Any]:
    gathered = summary.Summary()
    for metrics, usage in entries:
        gathered.add(metrics, usage)
    return gathered.build(COUNTS, 9.0, cost)


def test_the_padding_ratio_is_of_those_that_were_padded_and_null_without_them() -> None:
    padded = _metrics(padding_tokens=30, choices=2), (5, 0, 9, 0)
    exact = _metrics(padding_tokens=0, choices=1), (60, 0, 9, 0)
    unknown = _metrics(padding_tokens=None), (1000, 0, 9, 0)
    assert _built(padded, exact, unknown)["padding_ratio"] == 0.3
    assert _built(unknown, (_metrics(), (10, 0, 1, 0)))["padding_ratio"] is None


def test_acceptance_is_of_all_drafts() -> None:
    drafted = _metrics(draft_tokens=6, draft_tokens_accepted=3), _metrics(draft_tokens=2)
    found = _built(*((metrics, (1, 0, 1, 0)) for metrics in (*drafted, _metrics())))
    assert (found["draft_tokens"], found["draft_acceptance"]) == (8, 0.375)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.sampled_from(summary.PERCENTILES))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    found = summary.percentile(sorted(values), percent)
    reaching = [value for value in values if sum(v <= value for v in values) * 100 >= percent * len(values)]
    assert found == min(reaching)


def test_a_job_where_nothing_ran_has_no_ratios() -> None:
    found = _built()
    assert found["tokens"] == {"prompt": 0, "cached": 0, "completion": 0, "reasoning": 0}
    for name in ("tokens_per_second", "prefix_hit_ratio", "dedupe_ratio", "cost", "draft_acceptance"):
        assert found[name] is None
    assert set(found["latency"].values()) == {None}
    assert (found["seconds"], found["worker_seconds"], found["workers"]) == (0.0, 0.0, 0)


def test_rates_count_only_what_was_computed() -> None:
    follower = _metrics(deduplicated_from="a", started_at=0.0, finished_at=99.0)
    found = _built((_metrics(), (10, 5, 8, 3)), (follower, (10, 5, 8, 3)))
    assert found["tokens"] == {"prompt": 20, "cached": 10, "completion": 16, "reasoning": 6}
    assert found["tokens_per_second"] == 4.0
    assert found["prefix_hit_ratio"] == 0.5
    assert found["dedupe_ratio"] == 0.5
    assert (found["seconds"], found["running_seconds"]) == (3.0, 2.0)


def test_time_of_a_worker_is_counted_once_where_requests_overlap() -> None:
    spans = [("w1", 10, 14), ("w1", 12, 13), ("w1", 13, 16), ("w1", 20, 21), ("w2", 10, 12)]
    entries = [
        (_metrics(worker=worker, started_at=float(start), finished_at=float(end)), (1, 0, 1, 0))
        for worker, start, end in spans
    ]
    found = _built(*entries, cost=3600.0)
    assert (found["workers"], found["worker_seconds"]) == (2, 9.0)
    assert found["cost"] == pytest.approx(9.0)


def test_what_the_engine_cannot_know_is_left_out_of_percentiles() -> None:
    found = _built(
        (_metrics(ttft_seconds=None, attempts=1), (1, 0, 1, 0)), (_metrics(ttft_seconds=2.0), (1, 0, 1, 0))
    )
    assert found["latency"]["ttft_seconds"] == {"p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert found["retried_requests"] == 1
