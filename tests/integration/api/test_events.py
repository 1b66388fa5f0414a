"""Server-sent events: who hears what, what is heard after a break, and that they end with the server."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from api import changes, events
from jobs import keys
from jobs.settings import Settings
from tests.integration.api import serving
from tests.integration.api.conftest import keyed
from tests.integration.api.serving import Api, Hand, line, until

Event = tuple[str, dict[str, Any], str]


@contextlib.contextmanager
def listening(api: Api, headers: dict[str, str] | None = None, after: str = "") -> Iterator[Iterator[Event]]:
    """Listen; yields (name, data, id) as they come."""
    sent = (headers or {}) | ({"Last-Event-ID": after} if after else {})
    with api.http.stream("GET", "/v1/events", headers=sent, timeout=15) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield parsed(answer)


def parsed(answer: httpx.Response) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for text in answer.iter_lines():
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], orjson.loads(fields["data"]), fields["id"]
            fields = {}


def named(heard: Iterator[Event], name: str) -> dict[str, Any]:
    """Return the data of the next event of that name."""
    return next(data for found, data, _ in heard if found == name)


def body(name: str) -> dict[str, Any]:
    return {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [line(name)]}


def test_each_change_of_a_job_is_told_as_the_batch_it_is_then(api: Api) -> None:
    with listening(api) as heard:
        assert next(heard)[:2] == ("reset", {"reachable": True})
        job = api.create("a", "b")
        assert named(heard, "batch") == api.http.get(f"/v1/batches/{job}").json()
        hand = Hand(api.context, job, 2)
        hand.begin()
        assert named(heard, "batch")["request_counts"]["total"] == 2
        hand.part((0, "a", False), (1, "b", True))
        counts = named(heard, "batch")["request_counts"]
        assert counts == {"total": 2, "completed": 1, "failed": 1}
        hand.end()
        hand.finish()
        ended = next(data for name, data, _ in heard if name == "batch" and data["status"] == "completed")
        assert ended == api.http.get(f"/v1/batches/{job}").json()


def test_a_tenant_hears_of_its_own_jobs_only(settings: Settings) -> None:
    one, two = keyed(settings, "one", "two")
    with serving.serve(settings) as api, listening(api, one) as heard:
        next(heard)
        other = api.http.post("/v1/batches", json=body("a"), headers=two).json()["id"]
        mine = api.http.post("/v1/batches", json=body("b"), headers=one).json()["id"]
        seen = [next(heard)]
        while seen[-1][0] != "batch":
            seen.append(next(heard))
        assert seen[-1][1]["id"] == mine
        assert other not in str(seen)


def test_who_comes_back_hears_what_it_missed_and_no_more(api: Api) -> None:
    with listening(api) as heard:
        next(heard)
        api.create("a")
        *_, last = next(event for event in heard if event[0] == "batch")
    job = api.create("b")
    with listening(api, after=last) as heard:
        name, data, _ = next(event for event in heard if event[0] in ("batch", "reset"))
        assert (name, data["id"]) == ("batch", job)


@pytest.mark.parametrize("last", ["x", "0" * 26 + ".1", ""])
def test_who_comes_with_an_id_that_is_not_known_is_told_to_look_anew(api: Api, last: str) -> None:
    with listening(api, after=last) as heard:
        assert next(heard)[0] == "reset"


def test_a_listener_that_missed_more_than_is_kept_is_told_to_look_anew(
    api: Api,
) -> None:
    with listening(api) as heard:
        *_, last = next(heard)
        api.create("a")
        named(heard, "batch")
        news = api.app.state.changes.news
        while len(news) > 1:
            news.popleft()
    with listening(api, after=last) as heard:
        assert next(heard)[0] == "reset"


def test_a_revoked_key_hears_nothing_more(settings: Settings) -> None:
    one, again = keyed(settings, "one", "one")
    with serving.serve(settings) as api, listening(api, one) as heard:
        next(heard)
        keys.revoke(api.context.store, one["Authorization"].split("_")[1])
        until(lambda: api.http.get("/v1/models", headers=one).status_code == 401)
        api.http.post("/v1/batches", json=body("a"), headers=again)
        assert list(heard) == []


def test_only_so_many_of_a_tenant_listen_and_who_leaves_makes_room(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MOST_OF_TENANT", 1)
    with listening(api) as heard:
        next(heard)
        refused = api.http.get("/v1/events")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    until(lambda: _heads(api) == 200)


def test_of_a_rush_only_so_many_get_in_and_all_who_leave_make_room(api: Api) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    ask = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for _ in range(2):
        with contextlib.ExitStack() as open_links:
            links = [
                open_links.enter_context(socket.create_connection((host, int(port)), timeout=15))
                for _ in range(changes.MOST_OF_TENANT + 28)
            ]
            for link in links:
                link.sendall(ask)
            told = Counter(link.recv(12) for link in links)
        assert told == {b"HTTP/1.1 200": changes.MOST_OF_TENANT, b"HTTP/1.1 503": 28}
        until(lambda: api.app.state.changes._listeners.total() == 0)


def _heads(api: Api) -> int:
    with api.http.stream("GET", "/v1/events") as answer:
        return answer.status_code


def test_a_comment_shows_that_a_quiet_server_lives(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.2)
    with api.http.stream("GET", "/v1/events") as answer:
        lines = answer.iter_lines()
        until(lambda: next(lines) == ":")


def test_nobody_listens_and_redis_is_left_alone(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_STAY_SECONDS", 0.1)
    with listening(api) as heard:
        next(heard)
    until(lambda: api.app.state.changes._task.done())
    with listening(api) as heard:
        next(heard)
        api.create("a")
        assert named(heard, "batch")


def test_listeners_do_not_keep_a_server_from_ending(settings: Settings, free_port: int) -> None:
    script = (
        "import sys; from api import __main__, app; from jobs.settings import Settings; "
        "Settings.load = classmethod(lambda cls: Settings.model_validate_json(sys.stdin.read())); "
        f"sys.argv = ['api', '--port', '{free_port}']; sys.exit(__main__.main())"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert started.stdin is not None
    started.stdin.write(settings.model_dump_json(exclude_unset=True).encode())
    started.stdin.close()
    try:
        url = f"http://127.0.0.1:{free_port}"
        until(lambda: _answers(url), 30)
        with httpx.stream("GET", f"{url}/v1/events", timeout=15) as answer:
            heard = answer.iter_lines()
            next(heard)
            began = time.monotonic()
            started.send_signal(signal.SIGTERM)
            assert started.wait(10) == 0
            assert time.monotonic() - began < 8
            with contextlib.suppress(httpx.TransportError):
                list(heard)
    finally:
        started.kill()
        started.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").is_success
    except httpx.TransportError:
        return False


def test_a_job_that_came_and_ended_between_two_looks_is_told_once(api: Api) -> None:
    with listening(api) as heard:
        assert next(heard)[0] == "reset"
        job = api.create("a")
        hand = Hand(api.context, job, 1)
        hand.begin()
        hand.part((0, "a", False))
        hand.end()
        hand.finish()
        told = [named(heard, "batch")]
        while told[-1]["status"] != "completed":
            told.append(named(heard, "batch"))
        assert {batch["id"] for batch in told} == {job}
        api.create("b")
        assert named(heard, "batch")["id"] != job
