from pathlib import Path
from typing import Any

import orjson

from jobs import errors, ids, results
from jobs.answers import Choice, Outcome
from jobs.records import PartEntry, PlannedRequest, ResultRow
from jobs.store_local import LocalStore
from tests.unit import planning

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


def _outcome(*choices: Choice, **changed: Any) -> Outcome:
    facts: dict[str, Any] = {
        "choices": choices or (Choice("hello \u2028", "stop", 2),),
        "cached_tokens": 1,
        "started_at": 110.0,
        "finished_at": 112.5,
        "ttft_seconds": 0.5,
        "inter_token_seconds": 2.0,
    }
    return Outcome(**facts | changed)


def _rows(request: PlannedRequest, outcome: Outcome) -> list[ResultRow]:
    return results.rows_of(request, outcome, "m@1", 0, "w1")


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
        "choices": 1,
        "draft_tokens": 0,
        "draft_tokens_accepted": 0,
        "padding_tokens": None,
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
    assert row.usage == (3, 0, 2, 0)


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
    part.add(
        _rows(_request(followers=[[7, "b"], [9, "c"]]), _outcome(Choice("line\nbreak\r\u2028\0", "stop", 2)))
    )
    part.write(store)
    part.write(store)
    assert store.size(results.part_key(JOB, part.name)) == part.bytes
    read = list(results.read_part(store, JOB, PartEntry(part.name, [7])))
    assert [row.row for row in read] == [4, 9]
    assert read[0].line == part.rows[0].line
    assert results.list_parts(store, JOB) == [part.name]


def test_a_part_of_an_earlier_version_counts_no_reasoning(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (row,) = _rows(_request(), _outcome(Choice("x", "stop", 5, reasoning_tokens=4)))
    assert row.usage == (3, 1, 5, 4)
    old = orjson.loads(row.to_json()) | {"usage": [3, 1, 5]}
    store.put(results.part_key(JOB, "old"), orjson.dumps(old) + b"\n" + row.to_json() + b"\n")
    read = results.read_part(store, JOB, PartEntry("old"))
    assert [each.usage for each in read] == [(3, 1, 5, 0), (3, 1, 5, 4)]


def test_choices_are_counted_and_their_tokens_summed() -> None:
    (row,) = _rows(_request(), _outcome(Choice("a", "stop", 2), Choice("b", "length", 4)))
    assert row.metrics
    assert (row.metrics["choices"], row.metrics["completion_tokens"]) == (2, 6)
    assert row.usage == (3, 1, 6, 0)


def test_a_refusal_that_the_model_decides_is_a_line_for_each_follower() -> None:
    request = _request(endpoint="/v1/embeddings", params={"dimensions": 9}, followers=[[7, "b"]])
    rows = _rows(request, _outcome(embeddings=[[1.0, 0.0]]))
    assert [(row.row, row.failed, row.usage) for row in rows] == [(4, True, (0,) * 4), (7, True, (0,) * 4)]
    for row in rows:
        assert row.line["response"]["status_code"] == 400
        assert row.line["response"]["body"]["error"]["param"] == "dimensions"
