"""Whatever is sent: never a 5xx, always the contract's shape, and what is accepted is a Batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Batch

from api.errors import ErrorBody
from jobs import embedded
from jobs.settings import ModelSettings, Settings
from tests.integration.api import serving
from tests.integration.api.serving import Api

BOUNDED = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "input_file_id": st.just("FILE") | VALUES,
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
BODIES = st.fixed_dictionaries({}, optional=FIELDS | {"other": VALUES})
GOOD_BUT_ONE = st.sampled_from(sorted(FIELDS)).flatmap(lambda name: st.tuples(st.just(name), FIELDS[name]))
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/?#"), min_size=1, max_size=40)


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


def check(status: int, content: bytes) -> None:
    if status == 200:
        Batch.model_validate(orjson.loads(content), strict=True)
    else:
        assert 400 <= status < 500, content
        ErrorBody.model_validate(orjson.loads(content), strict=True)


def post(api: Api, body: Any, headers: dict[str, str] | None = None) -> None:
    try:
        data = orjson.dumps(body)
    except (TypeError, ValueError):  # 70-bit integers, NaN is null already, lone surrogates
        return
    answer = api.http.post("/v1/batches", content=data, headers=headers)
    check(answer.status_code, answer.content)


@BOUNDED
@given(body=BODIES | VALUES)
def test_any_json_body(api: Api, body: Any) -> None:
    post(api, body)


@pytest.fixture(scope="module")
def file_id(api: Api) -> str:
    return api.upload("a")


@BOUNDED
@given(change=GOOD_BUT_ONE)
def test_a_good_body_with_one_field_changed(api: Api, file_id: str, change: tuple[str, Any]) -> None:
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    name, value = change
    post(api, body | {name: file_id if value == "FILE" else value})


@BOUNDED
@given(data=st.binary(max_size=300), key=st.text(st.characters(codec="ascii", categories=["L", "N"])))
def test_any_bytes(api: Api, data: bytes, key: str) -> None:
    answer = api.http.post("/v1/batches", content=data, headers={"Idempotency-Key": key})
    check(answer.status_code, answer.content)
    for kind in ("multipart/form-data; boundary=b", "multipart/form-data", "text/plain"):
        form = b"--b\r\nContent-Disposition: form-data; " + data + b"\r\n--b--\r\n"
        answer = api.http.post("/v1/files", content=form, headers={"Content-Type": kind})
        assert answer.status_code == 400
        ErrorBody.model_validate(answer.json(), strict=True)


@BOUNDED
@given(name=NAMES, query=st.dictionaries(st.sampled_from(["limit", "after", "order"]), st.text(max_size=20)))
def test_any_path_and_query(api: Api, name: str, query: dict[str, str]) -> None:
    for path in ("/v1/batches/{}", "/v1/batches/{}/results", "/v1/files/{}", "/v1/files/{}/content", "/{}"):
        answer = api.http.get(path.replace("{}", quote("x" + name, safe="")), params=query)
        assert answer.status_code == 404
        ErrorBody.model_validate(answer.json(), strict=True)
    for path in ("/v1/batches", "/v1/files"):
        answer = api.http.get(path, params=query)
        assert answer.status_code in (200, 400), answer.text
