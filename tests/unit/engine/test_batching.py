"""Batches are made of like requests, within their limits, and the oldest is never left out."""

from hypothesis import given
from hypothesis import strategies as st

from jobs import buckets
from worker.engine import Request, Sampling, batching
from worker.engine.types import Row

LIMITS = batching.Limits(rows=8, tokens=1000, context_tokens=400)
sizes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 100)), min_size=1, max_size=30)


def rows(sizes: list[tuple[int, int]]) -> list[Row]:
    return [Row(Request(str(i), [1] * prompt, Sampling(output))) for i, (prompt, output) in enumerate(sizes)]


@given(sizes)
def test_a_batch_keeps_its_limits_and_holds_the_oldest(sizes: list[tuple[int, int]]) -> None:
    waiting = rows(sizes)
    batch = batching.form(waiting, LIMITS)
    assert waiting[0] in batch
    assert len(batch) <= 8
    assert len(batch) == 1 or len(batch) * batching.length(batch) <= 1000
    assert len({buckets.bucket(row.tokens) for row in batch}) == 1
    assert [row.tokens for row in batch] == sorted((row.tokens for row in batch), reverse=True)


@given(sizes)
def test_rows_of_one_length_only(sizes: list[tuple[int, int]]) -> None:
    waiting = rows(sizes)
    batch = batching.form(waiting, batching.Limits(8, 1000, 400, one_length=True))
    assert waiting[0] in batch
    assert len({row.tokens for row in batch}) == 1


def test_the_rows_most_like_the_oldest_run_with_it() -> None:
    waiting = rows([(100, 10), (5, 10), (98, 10), (300, 10), (103, 10)])
    batch = batching.form(waiting, batching.Limits(3, 10_000, 400))
    assert [row.id for row in batch] == ["4", "0", "2"]


def test_an_output_that_may_be_long_is_not_all_reserved() -> None:
    waiting = rows([(10, 100_000)] * 8)
    assert len(batching.form(waiting, batching.Limits(8, 8 * 1034, 200_000))) == 8
    assert len(batching.form(waiting, batching.Limits(8, 4 * 1034, 200_000))) == 4


def test_a_request_larger_than_the_limits_runs_alone() -> None:
    limits = batching.Limits(8, 1000, 10_000)
    assert len(batching.form(rows([(5000, 10), (5000, 10)]), limits)) == 1


def test_nothing_waits_nothing_runs() -> None:
    assert batching.form([], LIMITS) == []


def test_a_batch_is_cut_before_it_outgrows_its_limits_but_never_a_lone_row() -> None:
    assert not LIMITS.reached(5, 199)
    assert LIMITS.reached(5, 200)
    assert LIMITS.reached(2, 400)
    assert not LIMITS.reached(1, 5000)
