"""What is counted of requests whose results are written."""

from typing import Any

import pytest

from jobs import answers, errors, ledger_types, results
from jobs.metrics import shared
from jobs.records import PlannedRequest, ResultRow
from tests.unit.metrics.test_families import samples
from worker.metrics import endpoint, finished, state


def planned(**fields: Any) -> PlannedRequest:
    values: dict[str, Any] = {
        "id": "j:0",
        "job_id": "j",
        "row": 0,
        "custom_id": "a",
        "endpoint": "/v1/completions",
        "model": "m",
        "bucket": 128,
        "created_at": 100.0,
        "prompt_ids": [1, 2, 3],
        "params": {},
    }
    return PlannedRequest(**(values | fields))


def rows(outcome: answers.Outcome, **fields: Any) -> list[ResultRow]:
    return results.rows_of(planned(**fields), outcome, "m@0", 0, "w")


def ended(reason: str = "stop", ttft: float | None = 0.3) -> answers.Outcome:
    return answers.Outcome((answers.Choice("x", reason, 4),), 1, 101.0, 104.0, ttft, 0.05)


EMBEDDED = answers.Outcome((), 0, 101.0, 102.0, embeddings=[[1.0]])


def counted(*batches: list[ResultRow], model: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return what a registry shows of a model that no other test uses: some counters are the process's."""
    registry = endpoint.registry()
    one = finished.Finished(registry)
    for batch in batches:
        one.count(model, batch, refused=1)
    return {key: value for key, value in samples(registry).items() if model in key[1]}


def test_latencies_are_those_of_what_ran_and_tokens_those_of_all() -> None:
    found = counted(rows(ended(), followers=[(5, "b"), (7, "c")]), model="latencies")
    assert found["longhaul_time_to_first_token_seconds_count", ("latencies",)] == 1
    assert found["longhaul_time_to_first_token_seconds_sum", ("latencies",)] == 0.3
    assert found["longhaul_time_to_first_token_seconds_bucket", ("latencies", "0.25")] == 0
    assert found["longhaul_time_to_first_token_seconds_bucket", ("latencies", "0.5")] == 1
    assert found["longhaul_inter_token_latency_seconds_bucket", ("latencies", "0.05")] == 1
    assert found["longhaul_queue_seconds_sum", ("latencies",)] == 1
    assert found["longhaul_e2e_seconds_sum", ("latencies",)] == 4
    assert found["longhaul_prompt_tokens_total", ("latencies",)] == 9
    assert found["longhaul_requests_deduplicated_total", ("latencies",)] == 2
    assert found["longhaul_requests_finished_total", ("latencies", "stop")] == 3
    assert found["longhaul_rows_refused_total", ("latencies",)] == 1


def test_what_an_engine_cannot_know_is_not_counted_as_zero() -> None:
    found = counted(rows(ended(ttft=None)), model="unknown")
    assert found["longhaul_time_to_first_token_seconds_count", ("unknown",)] == 0
    assert found["longhaul_e2e_seconds_count", ("unknown",)] == 1


def test_a_models_series_begin_with_0() -> None:
    """Prometheus takes the first value for where a counter began, so what begins with 5 lost 5."""
    registry = endpoint.registry(["fresh"])
    finished.Finished(registry, ["fresh"])
    found = {key: value for key, value in samples(registry).items() if "fresh" in key[1]}
    assert set(found.values()) == {0}
    ended = {key[1][1] for key in found if key[0] == "longhaul_requests_finished_total"}
    assert ended == set(shared.REASONS)
    assert {name.partition("_bucket")[0] for name, _ in found} >= {
        *(family.full_name for family, _ in finished.LATENCIES.values()),
        *(family.full_name for family in (finished.PROMPT, finished.SAVED, finished.REFUSED)),
    }


def test_units_that_end_begin_with_0() -> None:
    registry = endpoint.registry()
    state.units_ended(registry)
    found = {key[1] for key in samples(registry) if key[0] == "longhaul_units_ended_total"}
    assert found == {(outcome, unit) for outcome in ("done", "failed") for unit in ledger_types.UNITS}


def test_vllms_buckets() -> None:
    """Dashboards made for vLLM ask for these bounds."""
    assert len(finished.FIRST_TOKEN) == 22
    assert finished.FIRST_TOKEN[-6:] == (20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
    assert finished.BETWEEN_TOKENS[:4] == (0.01, 0.025, 0.05, 0.075)
    assert len(finished.BETWEEN_TOKENS) == 19


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (rows(ended("length")), "length"),
        (
            rows(answers.Outcome((), 0, 101.0, 102.0, embeddings=[[1.0]]), endpoint=answers.EMBEDDINGS),
            "embedded",
        ),
        (results.given_up(planned(), "engine_error", "No."), "engine_error"),
        ([results.refused("j", 0, "a", errors.ParameterRefused("No.", param="n"))], "refused"),
    ],
)
def test_every_end_has_its_reason(made: list[ResultRow], reason: str) -> None:
    assert [finished.reason(row) for row in made] == [reason]
