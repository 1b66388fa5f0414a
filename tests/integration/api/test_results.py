"""Results while a batch runs: the cursor neither skips nor repeats a line. Metrics, running and ended."""

from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest

from jobs import recover, results
from tests.integration.api.serving import Api, Hand


def read(api: Api, batch_id: str, after: str | None = None) -> tuple[list[str], str]:
    """Return the custom ids behind a cursor, and the next cursor."""
    params = {"after": after} if after else {}
    answer = api.http.get(f"/v1/batches/{batch_id}/results", params=params)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    names = [orjson.loads(text)["custom_id"] for text in answer.content.splitlines()]
    return names, answer.headers["Longhaul-Next-After"]


def test_a_cursor_followed_through_the_end_gives_every_line_once(api: Api) -> None:
    batch_id = api.create("a", "b", "c", "d")
    seen, cursor = read(api, batch_id)
    assert seen == []
    hand = Hand(api.context, batch_id, 4)
    hand.begin()
    steps: list[Any] = [
        lambda: hand.part((2, "c", False)),
        lambda: None,
        lambda: (hand.part((0, "a", True)), hand.part((1, "b", False))),
        # Row 1 comes again, from a worker that had lost it: it is in the part, and does not count.
        lambda: hand.part((1, "b", False), (3, "d", False)),
        hand.end,
        hand.finish,
        api.context.ledger.redis.flushall,
    ]
    pages = []
    for step in steps:
        step()
        names, cursor = read(api, batch_id, cursor)
        pages.append(names)
    assert pages == [["c"], [], ["a", "b"], ["d"], [], [], []]
    assert read(api, batch_id)[0] == ["c", "a", "b", "d"]


def test_lines_are_those_of_the_files(api: Api) -> None:
    batch_id = api.create("a", "b")
    hand = Hand(api.context, batch_id, 2)
    hand.begin()
    hand.part((1, "b", True), (0, "a", False))
    hand.end()
    hand.finish()
    batch = api.client.batches.retrieve(batch_id)
    assert batch.output_file_id
    assert batch.error_file_id
    files = api.client.files.content(batch.output_file_id).content
    files += api.client.files.content(batch.error_file_id).content
    answer = api.http.get(f"/v1/batches/{batch_id}/results")
    assert sorted(answer.content.splitlines()) == sorted(files.splitlines())
    assert answer.headers["Longhaul-Batch-Status"] == "completed"


def test_cancelled_lines_come_too(api: Api) -> None:
    batch_id = api.create("a", "b")
    hand = Hand(api.context, batch_id, 2)
    hand.begin()
    hand.part((0, "a", False))
    _, cursor = read(api, batch_id)
    api.client.batches.cancel(batch_id)
    assert read(api, batch_id, cursor)[0] == []
    hand.finish()
    assert read(api, batch_id, cursor)[0] == ["b"]


def test_a_cursor_that_is_none_is_refused(api: Api) -> None:
    batch_id = api.create("a")
    for cursor in ("x", "MC4", "%00", "9" * 500, "é"):
        answer = api.http.get(f"/v1/batches/{batch_id}/results", params={"after": cursor})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


def test_a_cursor_into_parts_of_another_order_is_a_conflict_not_a_gap(api: Api) -> None:
    batch_id = api.create("a", "b", "c")
    hand = Hand(api.context, batch_id, 3)
    hand.begin()
    hand.part((0, "a", False))
    _, cursor = read(api, batch_id)
    hand.part((1, "b", False))
    key = f"{{{api.context.settings.namespace}}}:parts:{batch_id}"
    redis = api.context.ledger.redis
    redis.lmove(key, key, "LEFT", "RIGHT")
    answer = api.http.get(f"/v1/batches/{batch_id}/results", params={"after": cursor})
    assert answer.status_code == 409


def test_results_of_a_batch_that_redis_lost_are_unavailable_not_empty(serve: Callable[..., Api]) -> None:
    api = serve(reap_seconds=600)
    batch_id = api.create("a")
    api.context.ledger.redis.flushall()
    answer = api.http.get(f"/v1/batches/{batch_id}/results")
    assert answer.status_code == 503


def test_a_cursor_waits_while_its_batch_is_recovered(serve: Callable[..., Api]) -> None:
    api = serve(reap_seconds=600)
    batch_id = api.create("a", "b", "c")
    hand = Hand(api.context, batch_id, 3)
    hand.begin()
    hand.part((0, "a", False))
    hand.part((1, "b", True))
    _, cursor = read(api, batch_id)
    api.context.ledger.redis.flushall()
    api.context.ledger.create(hand.record)
    answer = api.http.get(f"/v1/batches/{batch_id}/results", params={"after": cursor})
    assert answer.status_code == 503
    api.context.ledger.redis.flushall()
    recover.recover(api.context.ledger, api.context.store)
    assert read(api, batch_id, cursor) == ([], cursor)
    assert read(api, batch_id)[0] == ["a", "b"]


def test_a_stream_that_breaks_off_does_not_look_complete(api: Api) -> None:
    batch_id = api.create("a", "b")
    hand = Hand(api.context, batch_id, 2)
    hand.begin()
    hand.part((0, "a", False))
    api.context.store.delete(results.part_key(batch_id, hand.part((1, "b", False))))
    with pytest.raises(httpx.RemoteProtocolError):
        api.http.get(f"/v1/batches/{batch_id}/results")


def metrics(api: Api, batch_id: str) -> dict[str, Any]:
    answer: httpx.Response = api.http.get(f"/v1/batches/{batch_id}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    return dict(answer.json())


def test_metrics_show_rates_while_it_runs_and_the_summary_at_the_end(api: Api) -> None:
    batch_id = api.create("a", "b")
    assert metrics(api, batch_id)["requests_per_second"] is None
    hand = Hand(api.context, batch_id, 2)
    hand.begin()
    hand.part((0, "a", False), (1, "b", False))
    hand.end()
    running = metrics(api, batch_id)
    assert running["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert running["output_tokens_per_second"] > 0
    hand.finish()
    summary = api.context.store.get(
        next(found.key for found in api.context.store.list("jobs/") if found.key.endswith("summary.json"))
    )
    assert metrics(api, batch_id) == orjson.loads(summary)
    for file in api.client.files.list(purpose="batch_output"):
        api.client.files.delete(file.id)
    assert metrics(api, batch_id)["request_counts"] == running["request_counts"]
    assert len(read(api, batch_id)[0]) == 2


def test_metrics_of_a_batch_that_failed_before_it_ran(api: Api) -> None:
    batch_id = api.create("a")
    Hand(api.context, batch_id, 1).fail("duplicate_custom_id", 2)
    assert metrics(api, batch_id)["status"] == "failed"
    batch = api.client.batches.retrieve(batch_id)
    assert batch.errors
    assert batch.errors.data
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == ("duplicate_custom_id", 2)
    assert read(api, batch_id)[0] == []
    assert api.http.post(f"/v1/batches/{batch_id}/cancel").status_code == 409
