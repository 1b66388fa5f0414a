import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion as TextCompletion

from jobs import errors, ids, results
from jobs.records import PartEntry, PlannedRequest, ResultRow
from jobs.store_local import LocalStore
from tests.unit import planning
from worker import translate
from worker.engine import Completion, Timings

JOB = planning.record().id


def _request(**changed: Any) -> PlannedRequest:
    facts: dict[str, Any] = {
        "id": f"{JOB}:4",
        "job_id": JOB,
        "row": 4,
        "custom_id": "a",
        "endpoint": planning.CHAT,
        "model": "m",
        "bucket": 128,
        "created_at": 100.0,
        "prompt_ids": [1, 2, 3],
        "params": {"max_tokens": 4, "temperature": 0.0, "stop": ["x"], "min_tokens": 0, "ignore_eos": False},
    }
    return PlannedRequest(**facts | changed)


def _outcome(**changed: Any) -> results.Outcome:
    facts: dict[str, Any] = {
        "text": "hello \u2028",
        "finish_reason": "stop",
        "completion_tokens": 2,
        "cached_tokens": 1,
        "started_at": 110.0,
        "finished_at": 112.5,
        "ttft_seconds": 0.5,
        "inter_token_seconds": 2.0,
    }
    return results.Outcome(**facts | changed)


def _rows(request: PlannedRequest, outcome: results.Outcome) -> list[ResultRow]:
    return results.rows_of(request, outcome, "m@1", 0, "w1")


def test_a_typed_client_reads_a_chat_completion() -> None:
    (row,) = _rows(_request(), _outcome())
    body = orjson.loads(orjson.dumps(row.line))["response"]["body"]
    found = ChatCompletion.model_validate(body, strict=True)
    assert found.choices[0].message.content == "hello \u2028"
    assert found.choices[0].finish_reason == "stop"
    assert found.usage
    assert found.usage.total_tokens == 5
    assert found.usage.prompt_tokens_details
    assert found.usage.prompt_tokens_details.cached_tokens == 1


def test_a_typed_client_reads_a_text_completion() -> None:
    (row,) = _rows(_request(endpoint=planning.TEXT), _outcome())
    found = TextCompletion.model_validate(row.line["response"]["body"], strict=True)
    assert found.choices[0].text == "hello \u2028"


def test_a_line_has_the_shape_of_the_contract() -> None:
    (row,) = _rows(_request(), _outcome())
    assert list(row.line) == ["id", "custom_id", "response", "error"]
    assert row.line["error"] is None
    assert row.line["response"]["status_code"] == 200
    assert row.line["id"].startswith("batch_req_")
    assert row.line["response"]["request_id"] == row.line["id"].removeprefix("batch_")


def test_a_rerun_gives_the_same_ids() -> None:
    first, second = (_rows(_request(), _outcome(finished_at=end))[0].line for end in (112.0, 912.0))
    assert first["id"] == second["id"]
    assert first["response"]["body"]["id"] == second["response"]["body"]["id"]


def test_followers_get_full_lines_of_their_own() -> None:
    leader, *followers = _rows(_request(followers=[[7, "b"], [9, "c"]]), _outcome())
    assert [row.row for row in followers] == [7, 9]
    assert [row.line["custom_id"] for row in followers] == ["b", "c"]
    assert len({row.line["id"] for row in (leader, *followers)}) == 3
    for row in followers:
        assert row.usage == leader.usage
        assert row.line["response"]["body"]["choices"] == leader.line["response"]["body"]["choices"]
        assert row.metrics
        assert row.metrics["deduplicated_from"] == "a"
    assert leader.metrics
    assert leader.metrics["deduplicated_from"] is None
    assert followers[0].line["id"] == ids.response_id(f"{JOB}:7")


def test_metrics_are_kept_beside_each_result() -> None:
    (row,) = _rows(_request(), _outcome())
    assert row.metrics == {
        "custom_id": "a",
        "bucket": 128,
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "completion_tokens": 2,
        "queue_seconds": 10.0,
        "ttft_seconds": 0.5,
        "inter_token_seconds": 2.0,
        "e2e_seconds": 12.5,
        "started_at": 110.0,
        "finished_at": 112.5,
        "attempts": 0,
        "worker": "w1",
        "deduplicated_from": None,
    }


def test_clocks_that_disagree_give_no_negative_time() -> None:
    (row,) = _rows(_request(created_at=200.0), _outcome(cached_tokens=None))
    assert row.metrics
    assert (row.metrics["queue_seconds"], row.metrics["e2e_seconds"]) == (0.0, 0.0)
    assert row.metrics["cached_tokens"] is None
    assert row.usage == (3, 0, 2)


def test_a_refusal_keeps_its_status_and_its_error_as_an_object() -> None:
    error = errors.ParameterRefused("max_tokens=-1: too small.", param="max_tokens")
    row = results.refused(JOB, 3, "a", error)
    assert row.failed
    assert row.line["error"] is None
    assert row.line["response"]["status_code"] == 400
    assert row.line["response"]["body"] == {
        "error": {
            "message": "max_tokens=-1: too small.",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "invalid_value",
        }
    }


def test_followers_share_the_error_of_their_leader() -> None:
    rows = results.given_up(_request(followers=[[7, "b"]]), "worker_lost", "It went away.")
    assert [(row.row, row.failed, row.metrics) for row in rows] == [(4, True, None), (7, True, None)]
    for row, name in zip(rows, "ab", strict=True):
        assert row.line["custom_id"] == name
        assert row.line["response"] is None
        assert row.line["error"] == {"code": "worker_lost", "message": "It went away."}


def test_a_part_gives_back_its_rows_but_those_to_skip(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    part = results.Part(JOB)
    part.add(_rows(_request(followers=[[7, "b"], [9, "c"]]), _outcome(text="line\nbreak\r\u2028\0")))
    part.write(store)
    part.write(store)
    assert store.size(results.part_key(JOB, part.name)) == part.bytes
    read = list(results.read_part(store, JOB, PartEntry(part.name, [7])))
    assert [row.row for row in read] == [4, 9]
    assert read[0].line == part.rows[0].line
    assert results.list_parts(store, JOB) == [part.name]


def test_an_engine_request_has_the_parameters_of_its_own_row() -> None:
    sampling = translate.engine_request(_request()).sampling
    assert (sampling.max_tokens, sampling.stop, sampling.temperature) == (4, ("x",), 0.0)
    assert sampling.seed == ids.seed(f"{JOB}:4")
    seeded = _request(params=_request().params | {"seed": -5, "top_p": 0.5, "top_k": 3, "min_p": 0.1})
    sampling = translate.engine_request(seeded).sampling
    assert (sampling.seed, sampling.top_p, sampling.top_k, sampling.min_p) == (-5, 0.5, 3, 0.1)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_times_between_tokens_need_two_tokens(count: int) -> None:
    completion = Completion("x", [7] * count, "t", "length", 0, Timings(1.0, 2.0, 10.0))
    (row,) = translate.rows_of(_request(), completion, "m@1", 2, "w1")
    assert row.metrics
    assert row.metrics["inter_token_seconds"] == (2.0 if count == 5 else None)
    assert math.isclose(row.metrics["ttft_seconds"], 1.0)
    assert row.metrics["attempts"] == 2
    assert row.usage == (3, 0, count)


def test_an_error_of_the_engine_is_a_failed_line() -> None:
    completion = Completion("x", [], "", "error", 0, Timings(1.0, None, 1.0), error="out of memory")
    (row,) = translate.rows_of(_request(), completion, "m@1", 0, "w1")
    assert row.failed
    assert row.line["error"] == {"code": "engine_error", "message": "out of memory"}
