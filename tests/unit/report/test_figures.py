"""The numbers of a report, against numbers made by hand."""

import pytest

from jobs.report import figures
from tests.unit.report import lines


def gathered(metrics: list[bytes], errors: list[bytes] | None = None) -> figures.Figures:
    gatherer = figures.Gatherer()
    gatherer.metrics(metrics)
    gatherer.errors(errors or [])
    return gatherer.build()


def test_tokens_are_spread_over_the_time_in_which_they_were_read_or_made() -> None:
    found = gathered([lines.metrics(), lines.metrics("b", started_at=101.0, finished_at=103.0)]).over_time
    assert found is not None
    slots = [int((moment - 100) / found.width + 0.5) for moment in (100.5, 101.5, 102.5, 103.5)]
    assert [found.running[slot] for slot in slots] == [1, 2, 2, 1]
    # a reads 6 tokens in 100-102 and makes 8 in 102-104; b has its first token as it ends: all in 101-103.
    assert [round(found.read_per_second[slot], 6) for slot in slots] == [3, 6, 3, 0]
    assert [round(found.generated_per_second[slot], 6) for slot in slots] == [0, 4, 8, 4]


@pytest.mark.parametrize("finished", [100.0, 100.0004, 250.0])
def test_no_token_is_lost_over_time(finished: float) -> None:
    found = gathered([lines.metrics(finished_at=finished, ttft_seconds=None)]).over_time
    assert found is not None
    assert sum(found.generated_per_second) * found.width == pytest.approx(8)
    assert sum(found.read_per_second) * found.width == pytest.approx(6)


def test_requests_with_the_result_of_an_equal_one_count_apart() -> None:
    found = gathered([lines.metrics(), lines.metrics("b", deduplicated_from="a", e2e_seconds=99.0)])
    assert (found.computed, found.deduplicated, found.deduplicated_tokens) == (1, 1, 10)
    assert (found.computed_prompt_tokens, found.cached_tokens) == (10, 4)
    assert found.latencies["e2e_seconds"] is not None
    assert found.latencies["e2e_seconds"].most == 9.0


def test_what_the_engine_cannot_know_is_not_drawn() -> None:
    unknown = {"ttft_seconds": None, "inter_token_seconds": None, "cached_tokens": None}
    found = gathered([lines.metrics(**unknown)])
    assert found.latencies["ttft_seconds"] is None
    assert found.cached_tokens == 0


def test_errors_are_told_apart_by_code_and_parameter_the_commonest_first() -> None:
    errors = [
        lines.refused("a", code="invalid_value", param="n"),
        lines.refused("b", "too large", code="invalid_value", param="top_p"),
        lines.refused("c", code="invalid_value", param="top_p"),
        lines.refused("d"),
        lines.lost("e"),
        lines.lost("f"),
        lines.lost("g"),
        lines.lost("h"),
    ]
    found = gathered([], errors).errors
    counts = {code: kind.count for code, kind in found.items()}
    assert list(counts.items())[:2] == [("worker_lost", 4), ("invalid_value (top_p)", 2)]
    assert counts["invalid_value (n)"] == counts["invalid_request_error"] == 1
    assert found["worker_lost"].examples == ["e", "f", "g"]
    assert found["invalid_value (top_p)"].message == "too large"


def test_kinds_and_texts_of_errors_are_bounded() -> None:
    found = gathered(
        [], [lines.lost("i" * 10**5, "m" * 10**5, f"{n:02}" + "c" * 10**5) for n in range(99)]
    ).errors
    assert len(found) == figures.MOST_KINDS + 1
    assert found["others"].count == 99 - figures.MOST_KINDS
    assert max(len(repr(kind)) for kind in found.values()) < 1000


def test_a_job_in_which_nothing_ran_has_nothing_over_time() -> None:
    found = gathered([], [lines.lost("a")])
    assert found.over_time is None
    assert set(found.latencies.values()) == {None}
