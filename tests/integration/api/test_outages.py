"""Redis really away and back, the store on S3, clients that ask before they send."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from openai.types import Batch

from jobs import embedded
from jobs.ledger import State
from jobs.settings import Settings
from tests.integration.api import serving
from tests.integration.api.serving import Api, Hand, line, until

BODY = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [line("a")]}


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[embedded.RedisServer]:
    """A Redis that the test may stop."""
    running = embedded.RedisServer(tmp_path / "redis", tmp_path / "redis.log")
    running.wait_ready()
    yield running
    running.server.stop()


def test_a_create_while_redis_is_away_is_completed_by_its_retry(
    settings: Settings, own_redis: embedded.RedisServer, tmp_path: Path
) -> None:
    changed = Settings(**(settings.model_dump() | {"redis_url": own_redis.url}))
    key = {"Idempotency-Key": "k"}
    with serving.serve(changed) as api:
        done = api.create("a")
        hand = Hand(api.context, done, 1)
        hand.begin()
        hand.part((0, "a", False))
        hand.end()
        hand.finish()
        own_redis.server.stop()
        answer = api.http.post("/v1/batches", json=BODY, headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "with an Idempotency-Key" in answer.json()["error"]["message"]
        assert api.http.get("/readyz").status_code == 503
        assert api.http.get("/healthz").status_code == 200
        assert "longhaul_redis_up 0.0" in api.http.get("/metrics").text
        assert api.http.get("/v1/files").status_code == 200
        for refused in (api.http.get("/v1/batches"), api.http.post(f"/v1/batches/{done}/cancel")):
            assert (refused.status_code, "Idempotency-Key" in refused.text) == (503, False)
        back = embedded.RedisServer(tmp_path / "redis", tmp_path / "redis2.log", port=own_redis.port)
        back.wait_ready()
        try:
            until(lambda: api.http.get("/readyz").status_code == 200)
            answer = api.http.post("/v1/batches", json=BODY, headers=key)
            assert answer.status_code == 200
            assert api.context.ledger.job(answer.json()["id"]) is not None
            assert len(list(api.context.store.list("job-index/"))) == 2
        finally:
            back.server.stop()


def test_a_redis_that_hangs_becomes_a_503_and_files_go_on(
    settings: Settings, own_redis: embedded.RedisServer
) -> None:
    changed = Settings(**(settings.model_dump() | {"redis_url": own_redis.url}))
    with serving.serve(changed) as api:
        batch_id = api.create("a")
        pid = api.context.ledger.redis.info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            answer = api.http.get(f"/v1/batches/{batch_id}")
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == (
                "The queue (Redis) does not answer at the moment. Send the request again."
            ), "a read needs no Idempotency-Key"
            assert time.monotonic() - began < 12
            assert api.http.get("/v1/files").status_code == 200
            assert api.http.get("/healthz").status_code == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: api.http.get(f"/v1/batches/{batch_id}").status_code == 200)


def test_accepted_jobs_that_a_full_redis_refuses_do_not_keep_others_from_their_end(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise redis.OutOfMemoryError("OOM")

    monkeypatch.setattr(api.context.acceptor, "enter_waiting", full)
    job_id = api.create("a")
    names, client = api.context.ledger._keys, api.context.ledger.redis
    client.hset(names.name("job", job_id), "expires_at", 1)
    client.zadd(names.name("deadlines"), {job_id: 1000})
    until(lambda: api.context.ledger.job(job_id).state is State.FINALIZING)  # type: ignore[union-attr]


def test_a_batch_lives_on_an_s3_store(settings: Settings, seaweedfs: embedded.SeaweedServer) -> None:
    changed = Settings(
        **(
            settings.model_dump()
            | {
                "store_url": f"s3://{seaweedfs.bucket}/api",
                "s3_endpoint_url": seaweedfs.endpoint_url,
                "s3_access_key_id": seaweedfs.access_key,
                "s3_secret_access_key": seaweedfs.secret_key,
            }
        )
    )
    with serving.serve(changed) as api:
        answers = [api.http.post("/v1/batches", json=BODY, headers={"Idempotency-Key": "k"}) for _ in "12"]
        assert answers[0].json() == answers[1].json()
        batch = Batch.model_validate(answers[0].json(), strict=True)
        hand = Hand(api.context, batch.id, 1)
        hand.begin()
        hand.part((0, "a", False))
        assert len(api.http.get(f"/v1/batches/{batch.id}/results").content.splitlines()) == 1
        hand.end()
        hand.finish()
        ended = api.client.batches.retrieve(batch.id)
        assert ended.output_file_id
        assert len(api.client.files.content(ended.output_file_id).content.splitlines()) == 1
        assert {file.id for file in api.client.files.list(purpose="batch")} == {batch.input_file_id}
        assert api.client.files.delete(batch.input_file_id).deleted


def test_a_client_that_asks_first_is_refused_before_it_sends(api: Api) -> None:
    host, _, port = api.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as link:
        link.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
            b"Content-Length: 900000000\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = link.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_restarted_api_goes_on_where_it_was(serve: Callable[..., Api]) -> None:
    batch_id = serve().create("a")
    assert serve().client.batches.retrieve(batch_id).status == "validating"
