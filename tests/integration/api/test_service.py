"""Everything around files and batches: shapes of errors, probes, metrics, documentation."""

import io
import logging
import re

import openai
import orjson
import pytest
import redis

from api import depth, status
from jobs import errors, log
from jobs.ledger import Ledger
from jobs.ledger_fleet import Present
from jobs.ledger_tenants import Tenants
from tests.integration.api.serving import Api, Hand


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/batches/", 404),
        ("PUT", "/v1/batches", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/nope", 404),
    ],
)
def test_errors_of_the_framework_have_the_contracts_shape(
    api: Api, method: str, path: str, status: int
) -> None:
    answer = api.http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert answer.headers["allow"]


def test_a_fault_of_ours_has_the_shape_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Tenants, "depth", fail)
    answer = api.http.get("/v1/queue")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "fault",
    [
        redis.ConnectionError("redis://secret"),
        redis.TimeoutError("secret"),
        redis.exceptions.OutOfMemoryError("secret"),
        errors.StoreUnreachable(url="s3://secret", reason="secret"),
    ],
)
def test_a_dependency_that_is_away_is_503(
    api: Api, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def fail(*_: object) -> None:
        raise fault

    batch_id = api.create("a")
    monkeypatch.setattr(Ledger, "jobs", fail)
    monkeypatch.setattr(Ledger, "ping", fail)
    for path in (f"/v1/batches/{batch_id}", "/v1/batches", "/readyz"):
        answer = api.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "secret" not in answer.text
        assert answer.headers["retry-after"] == "1"
    assert api.http.get("/healthz").json() == {"status": "ok"}


def test_models_are_those_of_the_settings(api: Api) -> None:
    assert [model.id for model in api.client.models.list()] == ["m"]
    assert api.client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError) as caught:
        api.client.models.retrieve("org/nope")
    assert caught.value.code == "model_not_found"


def test_the_queue_shows_models_and_open_units(api: Api) -> None:
    api.create("a")
    queue = api.http.get("/v1/queue").json()
    assert (queue["object"], queue["control"]) == ("queue", 1)
    (model,) = queue["models"]
    assert (model["model"], model["queued"], model["leased"], model["depth"], model["buckets"]) == (
        "m",
        0,
        0,
        0,
        {},
    )


def test_the_queue_tells_which_workers_there_are_and_what_fails(api: Api) -> None:
    fleet, exact = api.context.ledger.fleet, api.context.settings.fingerprints["m"]

    def told() -> tuple[int, int, str | None]:
        queue = api.http.get("/v1/queue").json()
        (model,) = queue["models"]
        return queue["workers"], model["workers"], model["reason"]

    assert told() == (0, 0, None)
    fleet.report(Present("w", "h", 1, None, "serving"))
    assert told() == (1, 0, None)
    fleet.report(Present("x", "h", 2, exact, "loading"))
    fleet.report(Present("y", "h", 3, exact, "retiring"))
    assert told() == (2, 1, None)
    fleet.report(
        Present("x", "h", 2, "other", "serving", models=(exact, "other"), unavailable={exact: "gone"})
    )
    assert told() == (2, 0, "gone")
    job_id = api.create("a")
    unit = api.context.ledger.claim_unit("plan")
    assert unit is not None
    api.context.ledger.release_unit(unit, 60, "no such file")
    assert api.http.get("/v1/queue").json()["failing"] == [
        {
            "batch": job_id,
            "unit": "plan",
            "failures": 1,
            "reason": "no such file",
            "waits": "its step 'plan' has failed once and is tried again: no such file",
        }
    ]


def test_workers_are_shown_by_the_names_of_models_without_host_and_process(api: Api) -> None:
    assert api.http.get("/v1/workers").json()["data"] == []
    fleet, served = api.context.ledger.fleet, api.context.settings.fingerprints["m"]
    fleet.report(Present("w", "secret-host", 4711, served, "serving", held=3, running=2, capacity=8))
    fleet.report(Present("planner", "secret-host", 4712, None, "serving", kv_usage_ratio=None))
    answer = api.http.get("/v1/workers")
    planner, worker = answer.json()["data"]
    assert (planner["model"], planner["models"], planner["kv_usage_ratio"]) == (None, [], None)
    assert (worker["id"], worker["model"], worker["models"]) == ("w", "m", ["m"])
    assert (worker["running"], worker["capacity"], worker["held"]) == (2, 8, 3)
    assert "secret-host" not in answer.text
    assert "4711" not in answer.text


def test_metrics_count_requests_by_route(api: Api) -> None:
    api.create("a")
    api.http.get("/v1/batches/nope")
    api.http.get("/nope/1")
    text = api.http.get("/metrics").text
    assert re.search(
        r'longhaul_api_requests_total\{method="GET",route="/v1/batches/\{batch_id\}",status="404"\} 1.0', text
    )
    assert 'route="none"' in text
    assert "longhaul_units_open 1.0" in text
    assert "/nope" not in text


def test_metrics_tell_of_deadlines_and_of_what_is_left(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "FRESH_SECONDS", 0.0)
    assert "longhaul_deadline_seconds " not in api.http.get("/metrics").text
    batch_id = api.create("a", "b")
    hand = Hand(api.context, batch_id, 2)
    hand.begin()
    assert hand.unit is not None
    api.context.ledger.add_shards(hand.unit, ["s"], 2)
    api.context.ledger.end_plan(hand.unit, 2, tokens=86_400)
    text = api.http.get("/metrics").text
    assert 'longhaul_open_tokens{model="m"} 86400.0' in text
    rate = re.search(r'longhaul_deadline_tokens_per_second\{model="m"\} ([0-9.]+)', text)
    assert rate
    assert float(rate[1]) == pytest.approx(1, rel=0.01)
    seconds = re.search(r"longhaul_deadline_seconds ([0-9.]+)", text)
    assert seconds
    assert 86_000 < float(seconds[1]) <= 86_400
    assert "longhaul_jobs_open 1.0" in text


def test_a_model_with_new_weights_is_one_model_in_the_metrics(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fingerprints under one label would be one series with two values, which Prometheus refuses."""
    monkeypatch.setattr(depth, "FRESH_SECONDS", 0.0)
    ledger = api.context.ledger
    for fingerprint in ("m@old", "m@new"):
        batch_id = api.create("a")
        unit = ledger.claim_unit("plan", batch_id)
        assert unit is not None
        ledger.begin_plan(unit, 1, "m", fingerprint)
    text = api.http.get("/metrics").text
    assert text.count('longhaul_requests_leased{model="m"}') == 1


def test_many_scrapes_and_probes_ask_redis_and_store_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "FRESH_SECONDS", 60.0)
    monkeypatch.setattr(status, "FRESH_SECONDS", 60.0)
    asked: list[str] = []
    real = Ledger.depth, Ledger.ping
    monkeypatch.setattr(Ledger, "depth", lambda self: (asked.append("depth"), real[0](self))[1])
    monkeypatch.setattr(Ledger, "ping", lambda self: (asked.append("ping"), real[1](self))[1])
    for _ in range(5):
        assert api.http.get("/metrics").status_code == 200
        assert api.http.get("/readyz").status_code == 200
    assert sorted(asked) == ["depth", "ping"]


def test_what_is_logged_of_a_request_has_the_id_that_its_answer_has(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise redis.ConnectionError("away")

    monkeypatch.setattr(Ledger, "ping", fail)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log.JsonLines())
    logging.getLogger("api").addHandler(handler)
    try:
        answer = api.http.get("/readyz")
    finally:
        logging.getLogger("api").removeHandler(handler)
    assert answer.status_code == 503
    (event,) = map(orjson.loads, stream.getvalue().splitlines())
    assert event["request_id"] == answer.headers["x-request-id"]


def test_the_documentation_tells_of_the_contracts_errors_only(api: Api) -> None:
    spec = api.http.get("/openapi.json").json()
    assert "HTTPValidationError" not in spec["components"]["schemas"]
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], (method, path)
            assert operation["summary"], (method, path)
            assert operation["description"], (method, path)
    create = spec["paths"]["/v1/batches"]["post"]
    assert create["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/NewBatch")
    assert "requests" in spec["components"]["schemas"]["NewBatch"]["properties"]
    assert api.http.get("/docs").status_code == 200


def test_an_endpoint_of_lines_says_how_it_is_served(api: Api) -> None:
    answer = api.http.post("/v1/embeddings", json={"model": "m", "input": "x"})
    assert answer.status_code == 404
    assert "POST /v1/batches" in answer.json()["error"]["message"]
