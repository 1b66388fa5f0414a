"""A worker and a producer against a Redis that restarts, hangs, or holds what is no message."""

import base64
import json
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs import embedded, ids, queue
from tests.integration import celery_worker


@pytest.fixture
def server(tmp_path: Path) -> Iterator[embedded.RedisServer]:
    """A Redis of this test alone, so that it may be stopped."""
    running = embedded.RedisServer(tmp_path / "redis", tmp_path / "redis.log")
    running.wait_ready()
    yield running
    running.server.kill()


@pytest.fixture
def worker(server: embedded.RedisServer, tmp_path: Path) -> Iterator[celery_worker.Worker]:
    running = celery_worker.Worker(server.url, tmp_path).wait_ready()
    running.wait_event("started")
    yield running
    running.kill()


def _restart(server: embedded.RedisServer, down_seconds: float) -> None:
    server.server.stop()
    time.sleep(down_seconds)
    again = embedded.RedisServer(server.server.log.parent / "redis", server.server.log, port=server.port)
    server.server = again.server
    server.wait_ready()


def _deliver(worker: celery_worker.Worker) -> None:
    job = ids.batch_id()
    worker.send(queue.PLAN, job)
    worker.wait_event(f"plan {job}", 10)


def test_goes_on_consuming_after_redis_restarts(
    worker: celery_worker.Worker, server: embedded.RedisServer
) -> None:
    opened = []
    for down_seconds in (0.0, 2.0, 0.5):
        _restart(server, down_seconds)
        time.sleep(1.5)  # a message sent into the cut may be lost: wakes are disposable
        _deliver(worker)
        opened.append(_settled_descriptors(worker))
    # One that is opened late may come on top; a leak of one a reconnect would be two by now.
    assert opened[-1] < opened[0] + 2, "a reconnect leaks no descriptor"
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    _deliver(worker)
    assert worker.inspect("engine")["state"] == "serving"
    worker.signal()
    assert worker.exit_code(5) == 0, worker.log


def _settled_descriptors(worker: celery_worker.Worker) -> int:
    """Return the fewest of two seconds: connections that come and go are no leak."""
    fewest = worker.descriptors
    for _ in range(20):
        time.sleep(0.1)
        fewest = min(fewest, worker.descriptors)
    return fewest


def test_stops_while_redis_is_away(worker: celery_worker.Worker, server: embedded.RedisServer) -> None:
    server.server.kill()
    celery_worker.wait_until(lambda: "Redis does not answer" in worker.log, "noticed")
    worker.signal()
    assert worker.exit_code(8) == 0, worker.log


def test_stops_while_redis_hangs(worker: celery_worker.Worker, server: embedded.RedisServer) -> None:
    server.server.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(1)
        worker.signal()
        assert worker.exit_code(15) == 0, worker.log
    finally:
        server.server.process.send_signal(signal.SIGCONT)


def test_goes_on_consuming_after_redis_hangs(
    worker: celery_worker.Worker, server: embedded.RedisServer
) -> None:
    server.server.process.send_signal(signal.SIGSTOP)
    time.sleep(8)  # longer than the socket timeout
    server.server.process.send_signal(signal.SIGCONT)
    time.sleep(1.5)
    _deliver(worker)


def test_outlives_a_full_redis(worker: celery_worker.Worker, server: embedded.RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        client.client_kill_filter(_type="normal")
        celery_worker.wait_until(lambda: "maxmemory" in worker.log, "noticed")
        client.config_set("maxmemory", 0)
    time.sleep(1.5)
    _deliver(worker)


def test_busy_threads_are_refilled_at_once(worker: celery_worker.Worker) -> None:
    producer = queue.Producer(worker.settings)
    fingerprint = worker.settings.fingerprints["m/x.y"]
    for _ in range(100):
        assert producer.send(queue.WAKE, fingerprint)
    producer.close()
    # On Celery's 1 s tick alone, four threads would take 25 s.
    celery_worker.wait_until(lambda: worker.events.count("wake") == 100, "100 wakes", 10)


def _message(body: object, headers: object) -> str:
    return json.dumps(
        {
            "body": base64.b64encode(json.dumps(body).encode()).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": headers,
            "properties": {
                "delivery_tag": ids.ulid(),
                "delivery_info": {"exchange": "", "routing_key": "control"},
                "body_encoding": "base64",
            },
        }
    )


def test_garbage_in_the_queue_is_dropped(worker: celery_worker.Worker, server: embedded.RedisServer) -> None:
    task = {"lang": "py", "task": queue.PLAN, "id": "1", "root_id": "1", "argsrepr": "", "kwargsrepr": ""}
    garbage = [
        b"not json",
        b"\xff\xfe\x00",
        b"",
        b"123",
        b"null",
        b"[]",
        b"{}",
        b'{"properties": {}}',
        _message([[], {}, {}], {}),
        _message([[], {}, {}], {"task": "no.such.task", "id": "1"}),
        _message([[], {}, {}], {"task": queue.PLAN}),
        _message([[], {}, {}], {**task, "id": "2"}),
        _message(5, task),
        _message([[5], {}, {}], {**task, "id": "3"}),
        _message([["../../etc"], {}, {}], {**task, "id": "4"}),
        _message([[], {}, {}], task).replace('"base64"', '"rot13"'),
        _message([[], {}, {}], task).replace("application/json", "application/x-python-serialize"),
    ]
    with redis.Redis.from_url(server.url) as client:
        for item in garbage:
            client.lpush("{longhaul}:celery:control", item)
        _deliver(worker)
        assert client.llen("{longhaul}:celery:control") == 0
    assert worker.process.poll() is None
    assert all(line.startswith("{") for line in worker.log.splitlines() if line), worker.log


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_read_whichever_way_it_comes(
    worker: celery_worker.Worker, server: embedded.RedisServer, tmp_path: Path
) -> None:
    bombed = tmp_path / "bombed"
    body = base64.b64encode(pickle.dumps([[Bomb(bombed)], {}, {}])).decode()
    task = {"lang": "py", "task": queue.PLAN, "id": "1", "root_id": "1", "argsrepr": "", "kwargsrepr": ""}
    with redis.Redis.from_url(server.url) as client:
        remote = "{longhaul}:celery:/0.celery.pidbox"
        celery_worker.wait_until(lambda: client.publish(remote, b"") > 0, "remote control listens", 10)
        for kind in ("application/x-python-serialize", "application/json", "pickle", "text/plain", ""):
            message = json.loads(_message([[], {}, {}], task))
            message |= {"body": body, "content-type": kind, "content-encoding": "binary"}
            client.lpush("{longhaul}:celery:control", json.dumps(message))
            client.publish(remote, json.dumps(message))
        client.lpush("{longhaul}:celery:control", pickle.dumps(Bomb(bombed)))
        client.publish(remote, pickle.dumps(Bomb(bombed)))
    _deliver(worker)
    assert worker.inspect("ping") == {"ok": "pong"}
    assert worker.process.poll() is None
    assert not bombed.exists()


def test_producer_gives_up_quickly_when_redis_hangs_or_is_away(server: embedded.RedisServer) -> None:
    settings = queue.Settings(redis_url=server.url)
    producer = queue.Producer(settings, seconds=0.3, pause_seconds=0.5)
    job = ids.batch_id()
    assert producer.send(queue.PLAN, job)
    server.server.process.send_signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert not producer.send(queue.PLAN, job)
        assert time.monotonic() - begun < 1
        begun = time.monotonic()
        assert not producer.send(queue.PLAN, job), "the pause after a failure costs nothing"
        assert time.monotonic() - begun < 0.05
    finally:
        server.server.process.send_signal(signal.SIGCONT)
    time.sleep(0.6)
    assert producer.send(queue.PLAN, job), "it comes back by itself"
    server.server.kill()
    begun = time.monotonic()
    assert not producer.send(queue.PLAN, job)
    assert time.monotonic() - begun < 1
    producer.close()
