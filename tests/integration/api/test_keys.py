"""Who is let in, and what they see: keys, tenants, and an API without keys."""

import asyncio
import time
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from jobs import ids, keys
from jobs.settings import Settings
from tests.integration.api.conftest import keyed
from tests.integration.api.serving import Api, Hand, line, until

PAGE = {"/", "/page/{name}"}
OPEN = {"/healthz", "/readyz", "/metrics", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", *PAGE}
Headers = dict[str, str]


def routes(api: Api) -> list[tuple[str, str]]:
    """Return (method, path with its {parameters}) of all that the app serves."""
    found = iter_route_contexts(api.app.routes)
    return [(method, route.path) for route in found for method in route.methods if method != "HEAD"]


def filled(path: str, batch_id: str, file_id: str) -> str:
    return path.replace(":path}", "}").format(batch_id=batch_id, file_id=file_id, model="m", name="main.js")


@pytest.fixture
def one(settings: Settings) -> Headers:
    """What a tenant sends."""
    return keyed(settings, "one")[0]


@pytest.fixture
def two(settings: Settings) -> Headers:
    """What another tenant sends."""
    return keyed(settings, "two")[0]


@pytest.fixture
def batch(api: Api, one: Headers, two: Headers) -> dict[str, Any]:
    """An ended batch of tenant one, with output and errors."""
    body = {
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "requests": [line("a"), line("b")],
    }
    made = api.http.post("/v1/batches", json=body | {"metadata": {"k": "secret-of-one"}}, headers=one).json()
    hand = Hand(api.context, made["id"], 2)
    hand.begin()
    hand.part((0, "a", False), (1, "b", True))
    hand.end()
    hand.finish()
    ended: dict[str, Any] = api.http.get(f"/v1/batches/{made['id']}", headers=one).json()
    assert ended["status"] == "completed"
    return ended


def test_every_route_under_v1_asks_for_a_key(api: Api, one: Headers, settings: Settings) -> None:
    revoked = keyed(settings, "one")[0]
    keys.revoke(api.context.store, revoked["Authorization"].split("_")[1])
    wrong: list[Headers] = [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer nope"},
        {"Authorization": one["Authorization"].replace("Bearer", "Basic")},
        {"Authorization": one["Authorization"][:-1]},
        revoked,
    ]
    asked = [(method, path) for method, path in routes(api) if path not in OPEN]
    assert len(asked) > 12
    bodies = set()
    for method, path in asked:
        assert path.startswith("/v1/"), f"{path} is neither under /v1 nor among those that are open"
        for headers in wrong:
            answer = api.http.request(method, filled(path, "x", "x"), headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
            bodies.add(answer.content)
        # Only the head: the answer of /v1/events never ends.
        with api.http.stream(method, filled(path, "x", "x"), headers=one) as known:
            assert known.status_code != 401, (method, path)
    assert len(bodies) == 1


def test_probes_metrics_and_documentation_need_no_key_and_tell_of_no_tenant(
    api: Api, batch: dict[str, Any]
) -> None:
    assert {path for _, path in routes(api) if not path.startswith("/v1/")} == OPEN
    for path in OPEN:
        answer = api.http.get(filled(path, "x", "x"))
        assert answer.status_code == 200
        for word in (batch["id"], "secret-of-one", 'tenant="'):
            assert word not in answer.text


def test_a_wrong_key_is_refused_before_the_body_is_looked_at(api: Api, one: Headers) -> None:
    for path, headers in (("/v1/batches", {}), ("/v1/files", {"Content-Type": "multipart/form-data"})):
        assert api.http.post(path, content=b"{", headers=headers).status_code == 401
        assert api.http.post(path, content=b"{", headers=headers | one).status_code == 400
    assert api.http.get("/v1/files?limit=x").status_code == 401


def test_what_is_anothers_answers_as_what_does_not_exist(
    api: Api, batch: dict[str, Any], one: Headers, two: Headers
) -> None:
    files = [found["id"] for found in api.http.get("/v1/files", headers=one).json()["data"]]
    assert len(files) == 5
    asked = [(method, path) for method, path in routes(api) if "_id}" in path]
    assert len(asked) > 6
    for method, path in asked:
        for file_id in files:
            suffix = file_id[len("file-") + 26 :]
            foreign = [filled(path, batch["id"], file_id), batch["id"], file_id]
            unknown_ids = [ids.batch_id(), ids.file_id() + suffix]
            unknown = [filled(path, *unknown_ids), *unknown_ids]
            seen = [
                _neutral(api.http.request(method, which[0], headers=two), which[1:])
                for which in (foreign, unknown)
            ]
            assert seen[0] == seen[1]
            assert seen[0][0] == 404
    assert len(api.http.get("/v1/files", headers=one).json()["data"]) == 5
    assert api.http.get(f"/v1/batches/{batch['id']}", headers=one).json() == batch


def _neutral(answer: httpx.Response, own_ids: list[str]) -> tuple[int, str, Headers]:
    text = answer.text
    for name in own_ids:
        text = text.replace(name, "ID")
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    return answer.status_code, text, headers


def test_lists_hold_ones_own_and_foreign_cursors_tell_nothing(
    api: Api, batch: dict[str, Any], one: Headers, two: Headers
) -> None:
    file_id = batch["output_file_id"]
    for path, foreign, unknown in (
        ("/v1/batches", batch["id"], ids.batch_id()),
        ("/v1/files", file_id, ids.file_id()),
    ):
        assert api.http.get(path, headers=one).json()["data"]
        assert api.http.get(path, headers=two).json()["data"] == []
        for order in ("asc", "desc"):
            answers = [
                api.http.get(path, params={"after": after, "order": order}, headers=two)
                for after in (foreign, unknown)
            ]
            assert answers[0].content == answers[1].content
            assert answers[0].status_code == 200


def test_anothers_file_is_no_input(api: Api, batch: dict[str, Any], two: Headers) -> None:
    seen = []
    for file_id in (batch["input_file_id"], batch["output_file_id"], ids.file_id()):
        body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": file_id}
        answer = api.http.post("/v1/batches", json=body, headers=two)
        seen.append(_neutral(answer, [file_id])[:2])
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == 400
    assert api.http.get("/v1/batches", headers=two).json()["data"] == []


def test_a_running_batch_of_another_is_not_cancelled(api: Api, one: Headers, two: Headers) -> None:
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [line("a")]}
    batch_id = api.http.post("/v1/batches", json=body, headers=one).json()["id"]
    assert api.http.post(f"/v1/batches/{batch_id}/cancel", headers=two).status_code == 404
    assert api.http.get(f"/v1/batches/{batch_id}", headers=one).json()["status"] == "validating"
    assert api.http.post(f"/v1/batches/{batch_id}/cancel", headers=one).json()["status"] == "cancelling"


def ask(api: Api, client: str, headers: Headers | None = None, path: str = "/v1/models") -> httpx.Response:
    """Ask the app as if from the address `client`."""

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(api.app, client=(client, 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.get(path, headers=headers)

    return asyncio.run(get())


def test_without_any_key_only_this_machine_is_answered(api: Api) -> None:
    assert api.http.get("/v1/models").status_code == 200
    assert api.http.get("/v1/models", headers={"Authorization": "Bearer any"}).status_code == 200
    refused = [
        ask(api, "203.0.113.7"),
        # uvicorn takes the address from a proxy on this machine.
        api.http.get("/v1/models", headers={"X-Forwarded-For": "203.0.113.7"}),
        api.http.get("/v1/models", headers={"Host": "rebound.example.org"}),
        api.http.get("/v1/models", headers={"Origin": "https://example.org"}),
    ]
    for answer in refused:
        assert answer.status_code == 401
        assert "longhaul keys create" in answer.json()["error"]["message"]
    assert ask(api, "203.0.113.7", path="/healthz").status_code == 200


def test_the_first_key_shuts_the_door_and_its_revocation_does_not_open_it(api: Api) -> None:
    assert api.http.get("/v1/models").status_code == 200
    record, key = keys.create(api.context.store, "one")
    began = time.monotonic()
    until(lambda: api.http.get("/v1/models").status_code == 401)
    headers = {"Authorization": f"Bearer {key}"}
    assert api.http.get("/v1/models", headers=headers).status_code == 200
    assert ask(api, "203.0.113.7", headers).status_code == 200
    assert time.monotonic() - began < 5
    keys.revoke(api.context.store, record.id)
    began = time.monotonic()
    until(lambda: api.http.get("/v1/models", headers=headers).status_code == 401)
    assert time.monotonic() - began < 5
    assert api.http.get("/v1/models").status_code == 401


def test_what_was_made_without_keys_is_the_tenant_default(api: Api, settings: Settings) -> None:
    batch_id = api.create("a")
    mine, others = keyed(settings, "default", "others")
    until(lambda: api.http.get("/v1/models").status_code == 401)
    assert api.http.get(f"/v1/batches/{batch_id}", headers=mine).status_code == 200
    assert api.http.get(f"/v1/batches/{batch_id}", headers=others).status_code == 404


@pytest.mark.parametrize("letter", "ilou")
def test_a_cursor_with_letters_no_id_has_is_refused(api: Api, letter: str) -> None:
    for path, start in (("/v1/files", "file-"), ("/v1/batches", "batch_")):
        answer = api.http.get(path, params={"after": start + letter * 26})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
