"""How fast work must go, from deadlines alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import deadlines
from jobs.deadlines import Due


def due(seconds: float, tokens: int, fingerprint: str | None = "m@0") -> Due:
    return Due("batch_x", 1000 + seconds, tokens, fingerprint)


def test_a_large_job_that_is_due_late_does_not_hide_a_small_one_that_is_due_soon() -> None:
    assert deadlines.needed([due(10_000, 50_000), due(10, 400)], 1000) == {"m@0": 40}


def test_what_is_due_by_a_deadline_adds_up() -> None:
    assert deadlines.needed([due(10, 100), due(20, 500)], 1000) == {"m@0": 30}


def test_models_need_rates_of_their_own_and_an_unplanned_job_none() -> None:
    found = deadlines.needed([due(10, 100), due(10, 10, "n@1"), due(1, 10**6, None)], 1000)
    assert found == {"m@0": 10, "n@1": 1}


def test_a_deadline_that_is_past_asks_for_all_of_it_now() -> None:
    assert deadlines.needed([due(-5, 70)], 1000) == {"m@0": 70}


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=12))
def test_the_rate_is_enough_and_no_lower_one_is(jobs: list[tuple[int, int]]) -> None:
    """Worked off one after the other at that rate, each job is in time, and one of them just so."""
    rate = deadlines.needed([due(*job) for job in jobs], 1000)["m@0"]
    done, slack = 0.0, []
    for seconds, tokens in sorted(jobs):
        done += tokens
        slack.append(rate * seconds - done)
    assert min(slack) == pytest.approx(0, abs=1e-6)
