"""Values in bars, and percentiles, against counting by hand and the rule of a job's summary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import summary
from jobs.profile import spread

TIMES = st.lists(st.floats(0, 1e6), min_size=1, max_size=80)
LENGTHS = st.lists(st.integers(0, 10**6), min_size=1, max_size=80)


def times(values: list[float]) -> spread.Spread:
    counted = spread.Times()
    for value in values:
        counted.add(value)
    found = counted.build()
    assert found is not None
    return found


def lengths(values: list[int]) -> spread.Spread | None:
    counted = spread.Lengths()
    for value in values:
        counted.add(value)
    return counted.build()


@given(TIMES)
def test_a_time_is_in_one_bar_of_few(values: list[float]) -> None:
    found = times(values)
    assert len(found.edges) == len(found.counts) + 1 <= 51
    assert (sum(found.counts), found.beyond) == (len(values), 0)
    for place, (low, high) in enumerate(zip(found.edges, found.edges[1:], strict=False)):
        low = low * (1 - 1e-9) if place else 0
        assert found.counts[place] <= sum(low <= value < high * (1 + 1e-9) for value in values)


@given(TIMES)
def test_an_estimate_is_within_one_percent_of_the_true_percentile(values: list[float]) -> None:
    found, ordered = times(values), sorted(values)
    for percent in summary.PERCENTILES:
        true = summary.percentile(ordered, percent)
        assert found.percentiles[f"p{percent}"] == pytest.approx(true, rel=0.01, abs=1e-4)
    assert found.least <= found.p50 <= found.p90 <= found.p99 <= found.most


def test_times_that_are_all_the_same_are_told_exactly() -> None:
    found = times([0.3] * 7)
    assert found.percentiles == {"p50": 0.3, "p90": 0.3, "p99": 0.3}
    assert (found.least, found.most) == (0.3, 0.3)
    assert found.mean == pytest.approx(0.3)
    assert found.counts == [*[0] * 6, 7, *[0] * 6]
    assert found.edges[6] <= 0.3 < found.edges[7]


@given(LENGTHS)
def test_percentiles_of_lengths_are_exact_and_none_is_lost(values: list[int]) -> None:
    found = lengths(values)
    if not any(values):
        assert found is None
        return
    assert found is not None
    exact = {f"p{percent}": summary.percentile(sorted(values), percent) for percent in summary.PERCENTILES}
    assert found.percentiles == exact
    assert sum(found.counts) + found.beyond == len(values)
    for place, (low, high) in enumerate(zip(found.edges, found.edges[1:], strict=False)):
        assert found.counts[place] == sum(low <= value < high for value in values)
    assert found.edges[0] <= found.least
    assert found.beyond == sum(value >= found.edges[-1] for value in values)
    assert len(found.counts) <= 52


@pytest.mark.parametrize(
    ("values", "edges", "counts", "beyond"),
    [
        ([12] * 5, (0, 1, 13), {12: 5}, 0),
        ([1, 2, 2, 3], (0, 1, 4), {1: 1, 2: 2, 3: 1}, 0),
        ([60, 80, 100], (60, 1, 101), {0: 1, 20: 1, 40: 1}, 0),
        ([990, 1000], (0, 20, 1020), {49: 1, 50: 1}, 0),
        ([10, *[100] * 200, 100_000], (0, 5, 205), {2: 1, 20: 200}, 1),
        ([*[0] * 200, 7], (0, 1, 3), {0: 200}, 1),
    ],
)
def test_bars_of_lengths_are_whole_and_round_and_a_straggler_does_not_squeeze_the_rest(
    values: list[int], edges: tuple[int, int, int], counts: dict[int, int], beyond: int
) -> None:
    found = lengths(values)
    assert found is not None
    assert (found.edges[0], found.edges[1] - found.edges[0], found.edges[-1]) == edges
    assert {place: count for place, count in enumerate(found.counts) if count} == counts
    assert found.beyond == beyond


def test_of_nothing_there_is_no_spread() -> None:
    assert spread.Times().build() is None
    assert spread.Lengths().build() is None
