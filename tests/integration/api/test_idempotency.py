"""One Idempotency-Key, one batch: repeated, at once, broken off half-way, with Redis away."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis

from jobs.ledger import Ledger
from jobs.settings import Settings
from tests.integration.api.conftest import keyed
from tests.integration.api.serving import Api, line, until


def body(api: Api) -> dict[str, Any]:
    return {
        "input_file_id": api.upload("a"),
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }


def create(api: Api, made: dict[str, Any], key: str = "k") -> httpx.Response:
    return api.http.post("/v1/batches", json=made, headers={"Idempotency-Key": key})


def jobs(api: Api) -> list[str]:
    return [found.key for found in api.context.store.list("job-index/")]


def test_the_same_request_again_is_the_same_batch(api: Api) -> None:
    made = body(api)
    first = create(api, made)
    again = create(api, dict(reversed(made.items())))
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json() == again.json()
    assert len(jobs(api)) == 1


def test_another_body_is_a_conflict(api: Api) -> None:
    made = body(api)
    create(api, made)
    answer = create(api, made | {"completion_window": "25h"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "Idempotency-Key")
    assert create(api, made | {"completion_window": "25h"}, "other").status_code == 200


def test_the_key_still_answers_when_the_input_file_is_gone(api: Api) -> None:
    made = body(api)
    first = create(api, made).json()
    api.client.files.delete(made["input_file_id"])
    assert create(api, made).json()["id"] == first["id"]


@pytest.mark.parametrize("inline", [False, True])
def test_ten_at_once_are_one_batch(api: Api, inline: bool) -> None:
    made = body(api)
    if inline:
        del made["input_file_id"]
        made["requests"] = [line("a"), line("b")]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: create(api, made), range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len({answer.json()["input_file_id"] for answer in answers}) == 1
    assert len(jobs(api)) == 1
    assert api.context.ledger.depth().control == 1


class FailAt:
    """Makes the nth write to the store (put or put_new) of a create raise, as a crash there would end it."""

    def __init__(self, api: Api, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at
        store = api.context.store
        for name in ("put", "put_new"):
            monkeypatch.setattr(store, name, self._guard(getattr(store, name)))

    def _guard(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise redis.ConnectionError("crash")
            return write(*args)

        return guarded


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_a_create_that_broke_off_is_completed_by_its_retry(
    api: Api, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    made = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [line("a")]}
    with monkeypatch.context() as patch:
        FailAt(api, patch, at)
        assert create(api, made).status_code == 503
    answer = create(api, made)
    assert answer.status_code == 200
    assert len(jobs(api)) == 1
    job = answer.json()["id"]
    assert api.context.ledger.job(job) is not None
    assert api.context.store.size(f"open/{job}") == 0
    assert len(api.client.files.list().data) == 1


def test_a_create_that_did_not_reach_the_ledger_is_completed_by_its_retry(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = body(api)

    def fail(*_: Any) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "create", fail)
        answer = create(api, made)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"] == "1"
        # Without a key a repetition would make a second batch: what is stored is accepted.
        other = api.http.post("/v1/batches", json=made)
        assert other.status_code == 200
    until(lambda: api.context.ledger.job(other.json()["id"]) is not None)
    again = create(api, made)
    assert again.status_code == 200
    assert api.context.ledger.job(again.json()["id"]) is not None
    assert len(jobs(api)) == 2


def test_without_redis_nothing_is_stored(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    made = body(api)
    before = {found.key for found in api.context.store.list("")}

    def fail(*_: Any) -> None:
        raise redis.TimeoutError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "ping", fail)
        assert create(api, made).status_code == 503
        assert api.http.post("/v1/batches", json=made).status_code == 503
    assert {found.key for found in api.context.store.list("")} == before
    assert create(api, made).status_code == 200


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_of_the_wrong_length_is_refused(api: Api, key: str) -> None:
    answer = create(api, body(api), key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_keys_of_tenants_do_not_meet(api: Api, settings: Settings) -> None:
    made = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [line("a")]}
    answers = [
        api.http.post(
            "/v1/batches",
            json=made,
            headers={"Idempotency-Key": "k"} | headers,
        )
        for headers in keyed(settings, "one", "two")
    ]
    assert answers[0].json()["id"] != answers[1].json()["id"]
