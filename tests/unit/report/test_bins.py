"""Values in bins and spans in slots, against counting and integrating by hand."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jobs.report import bins

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)
SPANS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100), st.floats(0, 50)), min_size=1, max_size=20)


@given(VALUES, st.booleans())
def test_every_value_is_in_one_bin_or_beyond(values: list[float], whole: bool) -> None:
    values = [float(int(value)) for value in values] if whole else values
    found = bins.histogram(values, whole)
    assert found is not None
    assert sum(found.counts) + found.beyond == len(values)
    assert len(found.counts) <= bins.BINS + 2
    end = found.start + found.width * len(found.counts)
    slack = found.width * 1e-6
    assert sum(value > end + slack for value in values) <= found.beyond
    assert found.beyond <= sum(value >= end - slack for value in values)
    assert found.percentiles["p99"] <= end + slack
    assert found.start <= found.least


@pytest.mark.parametrize(
    ("values", "start", "width", "counts", "beyond"),
    [
        ([0.0, 1.0, 1.0, 4.9], 0.0, 0.1, {0: 1, 10: 2, 49: 1}, 0),
        ([60.0, 80.0, 100.0], 60.0, 1.0, {0: 1, 20: 1, 40: 1}, 0),
        ([99.0, 100.0], 0.0, 2.0, {49: 1, 50: 1}, 0),
        ([0.1, *[1.0] * 200, 1000.0], 0.0, 0.05, {2: 1, 20: 200}, 1),
        ([0.0, 5e-324], 0.0, 0.02, {0: 2}, 0),
    ],
)
def test_bins_are_round_numbers_and_a_straggler_does_not_squeeze_the_rest(
    values: list[float], start: float, width: float, counts: dict[int, int], beyond: int
) -> None:
    found = bins.histogram(values)
    assert found is not None
    assert (found.start, found.width, found.beyond) == (start, pytest.approx(width), beyond)
    assert {place: count for place, count in enumerate(found.counts) if count} == counts


def test_whole_numbers_have_bins_of_whole_numbers() -> None:
    found = bins.histogram([1.0, 2.0, 3.0], whole=True)
    assert found is not None
    assert (found.width, found.counts) == (1.0, [0, 1, 1, 1])


def test_nothing_has_no_histogram() -> None:
    assert bins.histogram([]) is None


@given(SPANS)
def test_a_series_is_the_mean_of_each_slot(spans: list[tuple[float, float, float]]) -> None:
    ordered = [(min(a, b), max(a, b), rate) for a, b, rate in spans]
    reach = min(start for start, _, _ in ordered), max(end for _, end, _ in ordered)
    assume(reach[1] - reach[0] > 0.01)
    series = bins.Series(*reach)
    for span in ordered:
        series.add(*span)
    for slot, mean in enumerate(series.means()):
        low = reach[0] + slot * series.width
        inside = sum(
            rate * max(0.0, min(end, low + series.width) - max(start, low)) for start, end, rate in ordered
        )
        assert mean == pytest.approx(inside / series.width, abs=1e-6 * (1 + sum(r for *_, r in ordered)))


def test_there_are_at_most_so_many_slots() -> None:
    assert len(bins.Series(0.0, 1e9).means()) <= bins.SLOTS
    assert len(bins.Series(5.0, 5.0).means()) == 1
