"""Whatever is sent: never a 5xx, always what the OpenAPI document says, errors in the contract's shape."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai.types import Batch
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from api.errors import ErrorBody
from jobs import embedded
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from tests.integration.api import serving
from tests.integration.api.serving import Api

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
OPERATIONS = [
    *("POST /v1/files", "GET /v1/files", "GET /v1/files/{file_id}", "GET /v1/files/{file_id}/content"),
    *("DELETE /v1/files/{file_id}", "POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{batch_id}"),
    *("POST /v1/batches/{batch_id}/cancel", "GET /v1/batches/{batch_id}/results"),
    *("DELETE /v1/batches/{batch_id}", "GET /v1/batches/{batch_id}/metrics"),
    "GET /v1/batches/{batch_id}/profile",
    *("GET /v1/models", "GET /v1/models/{model}", "GET /v1/queue", "GET /v1/workers"),
    *("GET /healthz", "GET /readyz", "GET /metrics"),
]

# Nothing that reads an answer to its end gets one; test_events.py reads it as it comes.
ENDLESS = {"GET /v1/events"}


@pytest.fixture(scope="module")
def api(redis_server: embedded.RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One API for all examples."""
    directory: Path = tmp_path_factory.mktemp("fuzz")
    made = Settings(
        redis_url=redis_server.url,
        namespace="fuzz",
        store_url=f"file://{directory}",
        models={serving.MODEL: ModelSettings(source="none", engine="echo")},
        max_inline_bytes=100_000,
    )
    with serving.serve(made) as running:
        yield running


@pytest.fixture(scope="module")
def schema(api: Api) -> Any:
    """The document as it is served, with keepers for tests that need an id."""
    return schemathesis.openapi.from_dict(api.http.get("/openapi.json").json())


@pytest.fixture(scope="module")
def known(api: Api) -> dict[str, str]:
    """Values for path parameters under which something is found."""
    return {"file_id": api.upload("a"), "batch_id": api.create("a"), "model": serving.MODEL}


def test_every_operation_of_the_document_is_fuzzed(schema: Any) -> None:
    found = {f"{one.ok().method.upper()} {one.ok().path}" for one in schema.get_all_operations()}
    assert found - ENDLESS == set(OPERATIONS)


def fuzz(api: Api, schema: Any, known: dict[str, str], name: str, examples: int) -> None:
    """Send an operation data that fits its description, and data that does not."""
    method, path = name.split(" ")
    operation = schema[path][method]
    send(api, known, operation.as_strategy(generation_mode=GenerationMode.POSITIVE), examples)
    if operation.path_parameters or operation.query or operation.headers or operation.body:
        send(api, known, operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), examples)


def send(api: Api, known: dict[str, str], cases: Any, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, found=st.booleans())
    def each(case: Any, found: bool) -> None:
        if found and case.path_parameters:
            case.path_parameters = {key: known[key] for key in case.path_parameters}
        answer = case.call(base_url=api.url, timeout=30)
        case.validate_response(answer, checks=CHECKS)
        check(answer.status_code, answer.content)

    each()


def check(status: int, content: bytes) -> None:
    assert status < 500, content
    if status >= 400:
        ErrorBody.model_validate(orjson.loads(content), strict=True)


@pytest.mark.parametrize("name", OPERATIONS)
def test_answers_are_as_the_document_says(api: Api, schema: Any, known: dict[str, str], name: str) -> None:
    fuzz(api, schema, known, name, 50)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_answers_are_as_the_document_says(
    api: Api, schema: Any, known: dict[str, str], name: str
) -> None:
    fuzz(api, schema, known, name, 400)


# What no schema says: a good create with one field wrong, and bytes that are no JSON and no form.

BOUNDED = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "input_file_id": VALUES,
    "endpoint": st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]) | VALUES,
    "completion_window": st.sampled_from(["24h", "1m", "365d", "0h"]) | VALUES,
    "metadata": st.dictionaries(st.text(max_size=70), st.text(max_size=20) | SCALARS, max_size=18) | VALUES,
    "requests": st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=3) | VALUES,
    "output_expires_after": st.fixed_dictionaries(
        {"anchor": st.just("created_at") | VALUES, "seconds": st.integers(0, 3_000_000) | VALUES}
    )
    | VALUES,
    "priority": st.integers(-150, 150) | VALUES,
}
CHANGES = st.sampled_from(sorted(FIELDS)).flatmap(lambda name: st.tuples(st.just(name), FIELDS[name]))


@BOUNDED
@given(change=CHANGES)
def test_a_good_create_with_one_field_changed(
    api: Api, known: dict[str, str], change: tuple[str, Any]
) -> None:
    body = {
        "input_file_id": known["file_id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    } | dict([change])
    try:
        data = orjson.dumps(body)
    except TypeError:  # lone surrogates
        return
    answer = api.http.post("/v1/batches", content=data)
    check(answer.status_code, answer.content)
    if answer.status_code == 200:
        Batch.model_validate(orjson.loads(answer.content), strict=True)


@BOUNDED
@given(data=st.binary(max_size=300), key=st.text(st.characters(codec="ascii", categories=["L", "N"])))
def test_any_bytes(api: Api, data: bytes, key: str) -> None:
    sent: list[httpx.Response] = [
        api.http.post("/v1/batches", content=data, headers={"Idempotency-Key": key})
    ]
    for kind in ("multipart/form-data; boundary=b", "multipart/form-data", "text/plain"):
        form = b"--b\r\nContent-Disposition: form-data; " + data + b"\r\n--b--\r\n"
        sent.append(api.http.post("/v1/files", content=form, headers={"Content-Type": kind}))
    for answer in sent:
        assert answer.status_code == 400
        check(answer.status_code, answer.content)
