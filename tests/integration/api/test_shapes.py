"""Every status there is, in the contract's shape; and names in paths that would be more than names."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import redis

from api.errors import ErrorBody
from jobs import store_local
from jobs.ledger import Ledger
from jobs.settings import Quota
from tests.integration.api.serving import Api, line
from tests.integration.api.sockets import connected, refused
from tests.unit.test_security import HOSTILE

CREATE = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


def shaped(answer: httpx.Response, status: int) -> ErrorBody:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = ErrorBody.model_validate(answer.json(), strict=True)
    assert error.error.message
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    assert error.error.type == kinds.get(status, "invalid_request_error")
    return error


def conflict(api: Api) -> httpx.Response:
    for name in ("a", "b"):
        body = CREATE | {"requests": [line(name)]}
        answer = api.http.post("/v1/batches", json=body, headers={"Idempotency-Key": "k"})
    return answer


REFUSED: dict[int, Callable[[Api], httpx.Response]] = {
    400: lambda api: api.http.post("/v1/batches", json=CREATE),
    404: lambda api: api.http.get("/v1/files/nope"),
    405: lambda api: api.http.put("/v1/files"),
    409: conflict,
    413: lambda api: api.http.post("/v1/batches", content=b" " * 200_000),
    414: lambda api: api.http.get("/" + "x" * 5000),
    415: lambda api: api.http.post("/v1/batches", headers={"Content-Encoding": "gzip"}),
    431: lambda api: api.http.get("/", headers={"x": "y" * 17_000}),
}


@pytest.mark.parametrize("status", REFUSED)
def test_a_refusal_has_the_contracts_shape(api: Api, status: int) -> None:
    shaped(REFUSED[status](api), status)


def test_a_quota_and_a_missing_key_are_refused_in_the_contracts_shape(serve: Callable[..., Api]) -> None:
    api = serve(quotas={"*": Quota(open_requests=1)})
    shaped(api.http.post("/v1/batches", json=CREATE | {"requests": [line("a"), line("b")]}), 400)
    api.create("a")
    shaped(api.http.post("/v1/batches", json=CREATE | {"requests": [line("a")]}), 429)
    shaped(api.http.get("/v1/files", headers={"Host": "elsewhere.example"}), 401)


@pytest.mark.parametrize(
    ("fault", "status"), [(redis.ConnectionError(), 503), (redis.ResponseError(), 503), (KeyError(), 500)]
)
def test_a_failure_has_the_contracts_shape(
    api: Api, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int
) -> None:
    def fail(*_: object) -> None:
        raise fault

    api.create("a")
    monkeypatch.setattr(Ledger, "jobs", fail)
    answer = api.http.get("/v1/batches")
    if status == 503:
        shaped(answer, status)
    else:
        assert answer.status_code == 500
        ErrorBody.model_validate(answer.json(), strict=True)


def test_a_body_that_breaks_off_and_one_that_is_late_have_the_shape(serve: Callable[..., Api]) -> None:
    api = serve(upload_idle_seconds=0.3)
    with connected(api) as opened:
        opened.sendall(b"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        refused(opened, 408, "request_timeout")


def test_no_name_in_a_path_leads_out_of_the_store(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = api.http.get("/openapi.json").json()["paths"]
    parameterised = [(method, path) for path, found in paths.items() if "{" in path for method in found]
    assert len(parameterised) >= 8
    touched: list[Path] = []
    path = store_local.LocalStore.path

    def watched(self: store_local.LocalStore, key: str) -> Path:
        touched.append(path(self, key))
        return touched[-1]

    monkeypatch.setattr(store_local.LocalStore, "path", watched)
    (tmp_path / "x").write_text("secret")
    for method, route in parameterised:
        for name in HOSTILE:
            for form in (
                quote(name, safe="", errors="replace"),
                quote(quote(name, errors="replace"), safe=""),
            ):
                target = re.sub(r"\{[^}]*\}", lambda _, form=form: form, route)
                answer = api.http.request(method, target)
                if name.strip("./") or form.startswith("%25"):
                    assert answer.status_code in (404, 405, 414), (method, target, answer.text)
                assert "secret" not in answer.text
                if method != "HEAD" and answer.status_code >= 400:
                    ErrorBody.model_validate(answer.json(), strict=True)
    root = os.path.realpath(tmp_path / "store")
    assert all(os.path.realpath(one).startswith(root + os.sep) for one in touched)
    assert (tmp_path / "x").read_text() == "secret"
