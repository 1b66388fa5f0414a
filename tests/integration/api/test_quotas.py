"""Quotas of a tenant: what is over one is refused with 429 before anything is stored, and comes in later."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import redis

from jobs import errors, recover
from jobs.settings import Quota
from tests.integration.api.serving import Api, Hand, line

Serve = Callable[..., Api]


def inline(*names: str, **fields: Any) -> dict[str, Any]:
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return body | {"requests": [line(name) for name in names]} | fields


def create(api: Api, *names: str, **headers: str) -> httpx.Response:
    return api.http.post("/v1/batches", json=inline(*names), headers=headers)


def refused(answer: httpx.Response, name: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (429, "quota_exceeded", "rate_limit_error")
    assert name in error["message"]
    assert int(answer.headers["retry-after"]) >= 1


def test_a_batch_over_the_quota_waits_until_another_is_cancelled(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(open_requests=5)})
    first = create(api, "a", "b", "c").json()["id"]
    refused(create(api, "d", "e", "f"), "open_requests")
    assert create(api, "d", "e").status_code == 200
    assert len(api.http.get("/v1/batches").json()["data"]) == 2
    assert len(api.http.get("/v1/files").json()["data"]) == 2
    api.http.post(f"/v1/batches/{first}/cancel")
    assert create(api, "d", "e", "f").status_code == 200


def test_requests_of_an_uploaded_file_count_as_its_lines(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(open_requests=4)})
    api.create("a", "b", "c")
    with pytest.raises(AssertionError, match="quota_exceeded"):
        api.create("d", "e")


def test_a_batch_that_ends_frees_its_quota(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(open_requests=2)})
    job_id = create(api, "a", "b").json()["id"]
    hand = Hand(api.context, job_id, 2)
    hand.begin()
    refused(create(api, "c"), "open_requests")
    hand.part((0, "a", False))
    assert create(api, "c").status_code == 200
    refused(create(api, "d"), "open_requests")
    hand.part((1, "b", True))
    hand.end()
    assert create(api, "d").status_code == 200


def test_a_batch_larger_than_the_quota_is_told_so_at_once(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(open_requests=2, open_tokens=100)})
    answer = create(api, "a", "b", "c")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "quota_exceeded")
    answer = create(api, "long" * 200)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "quota_exceeded")


def test_a_refused_create_may_be_repeated_with_its_idempotency_key(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(open_requests=2)})
    first = create(api, "a", "b").json()["id"]
    key = {"Idempotency-Key": "k"}
    refused(create(api, "c", "d", **key), "open_requests")
    api.http.post(f"/v1/batches/{first}/cancel")
    made = create(api, "c", "d", **key)
    assert made.status_code == 200
    # It holds its place already, so that the same again is no second batch.
    assert create(api, "c", "d", **key).json()["id"] == made.json()["id"]


def test_creates_at_once_are_never_more_than_the_quota(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(open_requests=6)})
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: create(api, f"{n}-a", f"{n}-b").status_code, range(8)))
    assert sorted(answers) == [200] * 3 + [429] * 5


def test_the_same_create_at_once_reserves_one_place(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(open_requests=100)})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: create(api, "a", "b", **{"Idempotency-Key": "k"}), range(8)))
    assert len(api.context.ledger.tenants.open_jobs("default")) == 1


def test_files_beyond_the_quota_are_refused_until_some_are_deleted(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(file_bytes=1000)})

    def upload(size: int) -> httpx.Response:
        return api.http.post("/v1/files", files={"file": ("a", b"x" * size)}, data={"purpose": "batch"})

    kept = upload(600).json()["id"]
    refused(upload(600), "file_bytes")
    assert upload(300).status_code == 200
    assert upload(1001).status_code == 400
    api.http.delete(f"/v1/files/{kept}")
    assert upload(600).status_code == 200


def test_uploads_at_once_are_never_more_than_the_quota(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(file_bytes=1000)})
    file = ("a", b"x" * 400)
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda _: api.http.post("/v1/files", files={"file": file}, data={"purpose": "batch"}),
                range(8),
            )
        )
    assert sum(file["bytes"] for file in api.http.get("/v1/files").json()["data"]) <= 800


def test_calls_beyond_the_rate_are_refused_and_the_client_waits(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(requests_per_minute=60)})
    answers = [api.http.get("/v1/models") for _ in range(62)]
    assert [answer.status_code for answer in answers[:60]] == [200] * 60
    error = answers[61].json()["error"]
    assert (answers[61].status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert int(answers[61].headers["retry-after"]) == 1
    patient = openai.OpenAI(base_url=f"{api.url}/v1", api_key="key", max_retries=2)
    assert patient.models.list().data
    patient.close()
    assert api.http.get("/healthz").status_code == 200


def test_the_queue_view_shows_what_is_the_tenants(serve: Serve) -> None:
    api = serve()
    create(api, "a", "b")
    assert api.http.get("/v1/queue").json()["control"] == 1
    assert api.context.ledger.tenants.depth("other").control == 0


def test_what_is_refused_for_its_bytes_takes_no_place(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(open_requests=5, file_bytes=2000)})
    answer = create(api, *(letter * 400 for letter in "wxyz"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "quota_exceeded")
    assert create(api, "a", "b").status_code == 200


def test_what_is_refused_for_its_bytes_spends_no_idempotency_key(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(file_bytes=500)})
    key = {"Idempotency-Key": "k"}
    assert create(api, "x" * 900, **key).status_code == 400
    assert list(api.context.store.list("idempotency/")) == []
    assert create(api, "a", **key).status_code == 200


def test_an_input_that_is_stored_again_counts_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    # The race: the API ended after it had stored the requests, and before the job's record.
    api = serve(quotas={"*": Quota(file_bytes=200)})
    key = {"Idempotency-Key": "k"}
    with monkeypatch.context() as patch:
        patch.setattr(api.context.acceptor, "_write_record", _fail_after(api.context.acceptor._stored))
        assert create(api, "a", **key).status_code == 503
    assert len(api.http.get("/v1/files").json()["data"]) == 1
    assert create(api, "a", **key).status_code == 200


def _fail_after(step: Callable[..., Any]) -> Callable[..., Any]:
    def fail(tenant: str, new: Any, job_id: str, key: str, given: Any, *_: Any) -> None:
        step(tenant, job_id, given)
        raise errors.Unavailable("ended")

    return fail


def test_jobs_that_redis_lost_count_before_they_are_planned_again(serve: Serve) -> None:
    api = serve(quotas={"*": Quota(open_requests=5)}, reap_seconds=3600)
    inline_job = create(api, "a", "b").json()["id"]
    api.create("c", "d")
    hand = Hand(api.context, inline_job, 2)
    hand.begin()
    hand.part((0, "a", False))
    api.context.ledger.redis.flushall()
    recover.recover(api.context.ledger, api.context.store)
    refused(create(api, "e", "f", "g"), "open_requests")
    assert create(api, "e", "f").status_code == 200
    assert recover.recover(api.context.ledger, api.context.store) == []
    refused(create(api, "g"), "open_requests")


def test_a_file_that_is_stored_is_a_success_though_redis_goes_away(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = serve(quotas={"*": Quota(file_bytes=5000)})

    def away(*_: object) -> None:
        raise redis.ConnectionError("away")

    monkeypatch.setattr(api.context.ledger.tenants, "let_bytes_go", away)
    answer = api.http.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("quota", [Quota(open_requests=2), Quota(file_bytes=400)])
def test_equal_creates_at_once_do_not_refuse_each_other(serve: Serve, quota: Quota) -> None:
    api = serve(quotas={"*": quota})
    with ThreadPoolExecutor(10) as pool:
        key = {"Idempotency-Key": "k"}
        answers = list(pool.map(lambda _: create(api, "a", "b", **key), range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
