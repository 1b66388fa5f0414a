"""Requests over time, against integrating by hand."""

import random
from typing import Any

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jobs.profile import timeline
from tests.unit.report import lines

SPANS = st.lists(st.tuples(st.floats(0, 90_000), st.floats(0, 5000)), min_size=1, max_size=30)


def line(*requests: dict[str, Any]) -> timeline.OverTime:
    gathered = timeline.Timeline()
    for request in requests:
        gathered.add(orjson.loads(lines.metrics(**request)))
    found = gathered.build()
    assert found is not None
    return found


def at(found: timeline.OverTime, column: list[float], *moments: float) -> list[float]:
    return [column[int((moment - found.began_at) / found.bin_seconds + 0.5)] for moment in moments]


def test_tokens_are_spread_over_the_time_in_which_they_were_read_or_made() -> None:
    found = line({}, {"started_at": 101.0, "finished_at": 103.0})
    moments = (100.5, 101.5, 102.5, 103.5)
    assert at(found, found.running, *moments) == [1, 2, 2, 1]
    # a reads 6 tokens in 100-102 and makes 8 in 102-104; b has its first token as it ends: all in 101-103.
    assert at(found, found.per_second(found.read_tokens), *moments) == pytest.approx([3, 6, 3, 0])
    assert at(found, found.per_second(found.cached_tokens), *moments) == pytest.approx([2, 4, 2, 0])
    assert at(found, found.per_second(found.output_tokens), *moments) == pytest.approx([0, 4, 8, 4])
    assert sum(found.requests) == 2
    assert (found.longest_seconds, found.mean_running) == (4.0, 1.5)


@pytest.mark.parametrize("finished", [100.0, 100.0004, 250.0])
@pytest.mark.parametrize("unknown", [{}, {"ttft_seconds": None, "cached_tokens": None}])
def test_no_token_is_lost(finished: float, unknown: dict[str, Any]) -> None:
    found = line({"finished_at": finished, **unknown})
    assert sum(found.output_tokens) == pytest.approx(8, abs=0.2)
    assert sum(found.read_tokens) + sum(found.cached_tokens) == pytest.approx(10, abs=0.2)


@given(SPANS)
def test_a_timeline_stays_small_and_loses_nothing_in_whatever_order(spans: list[tuple[float, float]]) -> None:
    requests: list[dict[str, Any]] = [
        {"started_at": start, "finished_at": start + long, "ttft_seconds": long / 3} for start, long in spans
    ]
    found = line(*requests)
    assert len(found.running) <= 241
    assert sum(found.output_tokens) == pytest.approx(8 * len(spans), abs=0.3)
    assert sum(found.read_tokens) == pytest.approx(6 * len(spans), abs=0.3)
    ran = sum(found.running) * found.bin_seconds
    assert ran == pytest.approx(sum(long for _, long in spans), rel=0.01, abs=0.2 * found.bin_seconds)
    random.Random(len(spans)).shuffle(requests)
    again = line(*requests)
    assert (again.began_at, again.bin_seconds) == (found.began_at, found.bin_seconds)
    for name in ("running", "output_tokens", "read_tokens", "cached_tokens", "requests"):
        assert getattr(again, name) == pytest.approx(getattr(found, name), abs=0.002)


@given(SPANS)
def test_each_bin_is_the_mean_of_its_time(spans: list[tuple[float, float]]) -> None:
    assume(max(at + long for at, long in spans) > 1)
    found = line(*({"started_at": start, "finished_at": start + long} for start, long in spans))
    width = found.bin_seconds
    for place, mean in enumerate(found.running):
        low = found.began_at + place * width
        inside = sum(max(0.0, min(at + long, low + width) - max(at, low)) for at, long in spans)
        assert mean == pytest.approx(inside / width, abs=0.002)


def test_nothing_has_no_timeline() -> None:
    assert timeline.Timeline().build() is None


def test_widths_are_round_and_each_holds_whole_ones() -> None:
    for narrow, wide in zip(timeline._WIDTHS, timeline._WIDTHS[1:], strict=False):
        assert wide % narrow == 0
        assert wide / narrow <= 5
