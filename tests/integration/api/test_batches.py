"""Batches over HTTP: the life of a batch as the `openai` client sees it."""

import time
from collections.abc import Callable
from typing import Any

import openai
import orjson
import pytest
from openai.types import Batch

from jobs import finalize, ids, recover
from jobs.records import JobRecord, Manifest
from jobs.store import ObjectStore
from tests.integration.api.serving import Api, Hand, line, until

STAMPS = (
    "created_at",
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def strict(api: Api, batch_id: str) -> Batch:
    """Get a batch and parse it strictly; every field of the contract is there, times never decrease."""
    raw = api.http.get(f"/v1/batches/{batch_id}").json()
    assert set(Batch.model_fields) <= set(raw)
    assert all(type(count) is int for count in raw["request_counts"].values())
    batch = Batch.model_validate(raw, strict=True)
    order = ("created_at", "in_progress_at", "cancelling_at", "finalizing_at")
    ends = [raw[name] for name in STAMPS[3:6] + STAMPS[7:] if raw[name]]
    times = [raw[name] for name in order if raw[name]] + ends
    assert times == sorted(times)
    return batch


def test_the_life_of_a_batch(api: Api) -> None:
    file_id = api.upload("a", "b", "c")
    made = api.client.batches.create(
        input_file_id=file_id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"k": "v"},
    )
    assert (made.status, made.input_file_id, made.metadata) == ("validating", file_id, {"k": "v"})
    assert made.expires_at == made.created_at + 86_400
    assert abs(made.created_at - time.time()) < 5
    assert strict(api, made.id) == made
    hand = Hand(api.context, made.id, 3)
    hand.begin()
    hand.part((2, "c", False), (0, "a", False))
    hand.part((1, "b", True))
    hand.end()
    running = strict(api, made.id)
    assert running.status == "finalizing"
    assert running.request_counts
    assert running.request_counts.to_dict() == {
        "total": 3,
        "completed": 2,
        "failed": 1,
    }
    assert running.output_file_id is None
    hand.finish()
    done = strict(api, made.id)
    assert (done.status, done.model) == ("completed", "m")
    assert done.usage
    assert (done.usage.input_tokens, done.usage.output_tokens) == (10, 8)
    assert done.usage.input_tokens_details.cached_tokens == 4
    assert done.output_file_id
    assert done.error_file_id
    output = [orjson.loads(text) for text in api.client.files.content(done.output_file_id).text.splitlines()]
    failed = [orjson.loads(text) for text in api.client.files.content(done.error_file_id).text.splitlines()]
    assert [item["custom_id"] for item in output] == ["a", "c"]
    assert [item["custom_id"] for item in failed] == ["b"]
    assert failed[0]["response"]["body"]["error"]["param"] == "max_tokens"
    kinds = {file.purpose for file in api.client.files.list()}
    assert kinds == {"batch", "batch_output"}


def test_a_finished_batch_reads_the_same_once_redis_has_forgotten_it(api: Api) -> None:
    batch_id = api.create("a")
    hand = Hand(api.context, batch_id, 1)
    hand.begin()
    hand.part((0, "a", True))
    hand.end()
    hand.finish()
    before = strict(api, batch_id)
    assert (before.status, before.output_file_id) == ("completed", None)
    assert before.error_file_id
    api.context.ledger.redis.flushall()
    assert strict(api, batch_id) == before
    assert [batch.id for batch in api.client.batches.list()] == [batch_id]


def test_a_batch_that_redis_lost_waits_in_validating(serve: Callable[..., Api]) -> None:
    api = serve(reap_seconds=600)
    batch_id = api.create("a")
    api.context.ledger.redis.flushall()
    assert strict(api, batch_id).status == "validating"
    assert api.client.batches.cancel(batch_id).status == "cancelling"
    assert strict(api, batch_id).status == "cancelling"


def test_a_batch_is_not_ended_before_its_files_can_be_found(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The race: the finalizer dies between the manifest and the records of its files, and Redis loses all.
    api = serve(reap_seconds=600)
    batch_id = api.create("a")
    hand = Hand(api.context, batch_id, 1)
    hand.begin()
    hand.part((0, "a", False))
    hand.end()

    def only_manifest(store: ObjectStore, record: JobRecord, manifest: Manifest) -> Manifest:
        store.put_new(finalize.manifest_key(record.id), manifest.to_json())
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(finalize, "publish", only_manifest)
        with pytest.raises(Died):
            hand.finish()
    api.context.ledger.redis.flushall()
    waiting = strict(api, batch_id)
    assert (waiting.status, waiting.output_file_id, waiting.completed_at) == ("finalizing", None, None)
    assert waiting.request_counts.completed == 1
    recover.recover(api.context.ledger, api.context.store)
    batch = strict(api, batch_id)
    assert batch.status == "completed"
    assert api.client.files.content(batch.output_file_id).content


class Died(Exception):
    """The finalizer was killed here."""


def test_before_the_answer_the_record_and_the_markers_are_stored(api: Api) -> None:
    batch_id = api.create("a", priority=7, output_expires_after={"anchor": "created_at", "seconds": 3600})
    keys = {found.key for found in api.context.store.list("")}
    assert {f"jobs/{batch_id}/job.json", f"job-index/default/{batch_id}", f"open/{batch_id}"} <= keys
    record = api.context.batches.find(batch_id)
    assert record is not None
    assert (record.priority, record.output_expires_seconds) == (7, 3600)


def test_inline_requests_become_an_input_file(api: Api) -> None:
    requests = [line("a"), line("b", messages=[{"role": "user", "content": "\u2028 ü"}])]
    answer = api.http.post(
        "/v1/batches",
        json={"endpoint": "/v1/chat/completions", "completion_window": "1h", "requests": requests},
    )
    batch = Batch.model_validate(answer.json(), strict=True)
    content = api.client.files.content(batch.input_file_id).content
    assert [orjson.loads(text) for text in content.split(b"\n")[:-1]] == requests
    assert api.client.files.retrieve(batch.input_file_id).purpose == "batch"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": "file-00000000000000000000000000"}, "input_file_id"),
        ({"input_file_id": "../x"}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": "x"}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "€" * 513}}, "metadata"),
        ({"priority": 101}, "priority"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_create_is_refused_by_name_and_nothing_is_stored(
    api: Api, changes: dict[str, Any], param: str
) -> None:
    body = {
        "input_file_id": api.upload("a"),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    before = {found.key for found in api.context.store.list("")}
    answer = api.http.post("/v1/batches", json=body | changes, headers={"Idempotency-Key": "k"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert error["type"] == "invalid_request_error"
    assert {found.key for found in api.context.store.list("")} == before
    assert api.context.ledger.depth().control == 0


def test_a_body_nested_too_deeply_is_refused(api: Api) -> None:
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for depth in (300, 900):
        nested: Any = "x"
        for _ in range(depth):
            nested = [nested]
        answer = api.http.post("/v1/batches", json=body | {"requests": [{"body": nested}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_null_metadata_is_none(api: Api) -> None:
    assert strict(api, api.create("a", metadata=None)).metadata is None


def test_an_input_file_of_another_purpose_is_refused(api: Api) -> None:
    with pytest.raises(openai.BadRequestError, match="user_data") as caught:
        api.client.batches.create(
            input_file_id=api.upload("a", purpose="user_data"),
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
    assert caught.value.param == "input_file_id"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"a": NaN}', b'"\xff"', b"[" * 5000, b'"\\ud83d"']
)
def test_a_body_that_is_no_json_object_is_refused(api: Api, body: bytes) -> None:
    answer = api.http.post("/v1/batches", content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_inline_requests_over_a_limit_are_refused_with_the_limit_and_its_setting(api: Api) -> None:
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    many = api.http.post("/v1/batches", json=body | {"requests": [{}] * 51})
    assert (many.status_code, many.json()["error"]["code"]) == (400, "too_many_requests")
    assert "50 (LONGHAUL_MAX_REQUESTS_PER_JOB)" in many.json()["error"]["message"]
    large = api.http.post("/v1/batches", json=body | {"requests": [{"x": "y" * 200_000}]})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "file_too_large")
    assert "100000 bytes (LONGHAUL_MAX_INLINE_BYTES)" in large.json()["error"]["message"]


def test_lists_page_newest_first(api: Api) -> None:
    made = [api.create("a") for _ in range(5)]
    assert [batch.id for batch in api.client.batches.list(limit=2)] == made[::-1]
    page = api.http.get("/v1/batches", params={"limit": 2, "after": made[4]}).json()
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == (
        "list",
        made[3],
        made[2],
        True,
    )
    # Some that were deleted since they were listed: whoever goes on behind a page still comes to the end.
    record = api.context.batches.find(made[0])
    assert record is not None
    for _ in range(5):
        api.context.store.put(f"job-index/{record.tenant}/{ids.batch_id()}", b"")
    for limit in (1, 2, 3):
        assert [batch.id for batch in api.client.batches.list(limit=limit)] == made[::-1]
    empty = api.http.get("/v1/batches", params={"limit": 0}).json()
    assert (empty["data"], empty["first_id"], empty["last_id"]) == ([], None, None)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=101", "integer_above_max_value"),
        ("limit=-1", "integer_below_min_value"),
        ("limit=1.5", "invalid_value"),
        ("after=..%2fx", "invalid_value"),
    ],
)
def test_a_wrong_query_is_refused(api: Api, query: str, code: str) -> None:
    answer = api.http.get(f"/v1/batches?{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_cancel_twice_is_one_cancellation(api: Api) -> None:
    batch_id = api.create("a", "b")
    hand = Hand(api.context, batch_id, 2)
    hand.begin()
    hand.part((0, "a", False))
    first = api.client.batches.cancel(batch_id)
    assert first.status == "cancelling"
    assert first.cancelling_at
    assert api.context.store.size(f"jobs/{batch_id}/cancelled") == 0
    assert api.client.batches.cancel(batch_id) == first
    hand.finish()
    done = strict(api, batch_id)
    assert (done.status, done.request_counts and done.request_counts.failed) == ("cancelled", 0)
    assert api.client.batches.cancel(batch_id) == done
    assert done.error_file_id
    (cancelled,) = api.client.files.content(done.error_file_id).text.splitlines()
    assert orjson.loads(cancelled)["error"]["code"] == "batch_cancelled"


def test_a_batch_that_ended_or_is_about_to_cannot_be_cancelled(api: Api) -> None:
    batch_id = api.create("a")
    hand = Hand(api.context, batch_id, 1)
    hand.begin()
    hand.part((0, "a", False))
    hand.end()
    for finish in (False, True):
        if finish:
            hand.finish()
        with pytest.raises(openai.ConflictError):
            api.client.batches.cancel(batch_id)
        assert api.context.store.size(f"jobs/{batch_id}/cancelled") is None


@pytest.mark.parametrize(
    "path", ["", "/results", "/metrics", "/cancel"], ids=["get", "results", "metrics", "cancel"]
)
@pytest.mark.parametrize("name", ["nope", "..%2f..%2fx", "file-" + "0" * 26, "batch_" + "0" * 26])
def test_a_batch_that_is_none_is_404(api: Api, name: str, path: str) -> None:
    answer = api.http.request("POST" if path == "/cancel" else "GET", f"/v1/batches/{name}{path}")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")


def test_a_job_that_only_the_store_knows_is_entered_when_the_api_starts(serve: Callable[..., Api]) -> None:
    api = serve(reap_seconds=600)
    batch_id = api.create("a")
    api.context.ledger.redis.flushall()
    api.context.ledger.note_recovered(api.context.ledger.redis_run())
    again = serve()
    until(lambda: again.context.ledger.job(batch_id) is not None)


def test_a_batch_past_its_window_expires_without_any_worker(api: Api) -> None:
    batch_id = api.create("a", completion_window="1m")
    key = f"{{{api.context.settings.namespace}}}:"
    client = api.context.ledger.redis
    client.zadd(f"{key}deadlines", {batch_id: 1})
    client.hset(f"{key}job:{batch_id}", "expires_at", 1)
    until(lambda: strict(api, batch_id).status == "finalizing")
    hand = Hand(api.context, batch_id, 1)
    hand.finish()
    assert strict(api, batch_id).status == "expired"
