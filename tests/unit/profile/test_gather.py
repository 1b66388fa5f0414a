"""A profile, row by row and line by line."""

from typing import Any

import orjson
import pytest

from jobs import results
from jobs.errors import ParameterRefused
from jobs.profile import gather
from jobs.records import ResultRow
from tests.unit.report import lines


def row(number: int = 0, **changed: Any) -> ResultRow:
    name = f"c{number}"
    return ResultRow(number, False, {"custom_id": name}, orjson.loads(lines.metrics(name, **changed)))


def built(*rows: ResultRow) -> gather.Figures:
    gathered = gather.Profile()
    for one in rows:
        gathered.add(one)
    return gathered.build()


def test_rows_that_anothers_answer_served_count_but_have_no_times() -> None:
    found = built(row(), row(1, deduplicated_from="c0", e2e_seconds=99.0))
    assert (found.rows, found.computed, found.deduplicated) == (2, 1, 1)
    assert (found.computed_prompt_tokens, found.cached_tokens) == (10, 4)
    assert found.latency["e2e_seconds"] is not None
    assert (sum(found.latency["e2e_seconds"].counts), found.latency["e2e_seconds"].most) == (1, 9.0)


def test_errors_are_counted_by_code_and_the_first_listed_in_order() -> None:
    refused = results.refused("batch_x", 7, "seven", ParameterRefused("No.", param="n"))
    lost = ResultRow(2, True, results.never("batch_x", 2, "two", "worker_lost", "Gone."), None)
    found = built(refused, lost)
    assert found.errors.by_code == {ParameterRefused.code: 1, "worker_lost": 1}
    assert [(one["request"], one["custom_id"]) for one in found.errors.first] == [(3, "two"), (8, "seven")]
    assert found.rows == 2


def test_requests_that_never_ran_are_no_errors() -> None:
    code, message = results.NEVER_RAN["cancelled"]
    line = results.never("batch_x", 1, "one", code, message)
    found = built(row(), ResultRow(1, False, line, None))
    assert (found.rows, found.never_ran, found.errors.by_code) == (1, 1, {})


def test_the_summary_s_percentiles_replace_the_estimates() -> None:
    found = built(row(e2e_seconds=1.0), row(1, e2e_seconds=2.0))
    exact = {"p50": 1.0, "p90": 2.0, "p99": 2.0}
    after = found.exactly({"latency": {"e2e_seconds": exact, "ttft_seconds": None}})
    assert after.latency["e2e_seconds"] is not None
    assert after.latency["e2e_seconds"].percentiles == exact
    assert after.latency["ttft_seconds"] == found.latency["ttft_seconds"]
    assert found.exactly({}) == found


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({}, {}),
        ({"inter_token_seconds": None}, {"inter_token_seconds": "no answer has a second token."}),
        (
            {"inter_token_seconds": None, "ttft_seconds": None, "cached_tokens": None},
            dict.fromkeys(("inter_token_seconds", "ttft_seconds"), gather._NO_FIRST_TOKEN),
        ),
        (
            {"inter_token_seconds": None, "ttft_seconds": None, "completion_tokens": 0},
            dict.fromkeys(
                ("inter_token_seconds", "ttft_seconds", "completion_tokens"),
                "no request generated a token.",
            ),
        ),
    ],
)
def test_what_there_is_no_spread_of_has_a_reason(changed: dict[str, Any], missing: dict[str, str]) -> None:
    found = built(row(**changed))
    assert found.missing == missing
    assert {name for name, one in (found.latency | found.lengths).items() if one is None} == missing.keys()


def test_nothing_is_known_of_nothing() -> None:
    found = built()
    assert found.timeline is None
    assert not any(found.latency.values())
    assert found.missing == {}
