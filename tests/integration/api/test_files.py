"""Files over HTTP, with the `openai` client."""

import os
import resource
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.integration.api.serving import Api


def test_a_file_comes_back_byte_for_byte(api: Api) -> None:
    data = b'\xef\xbb\xbf{"a": "\xe2\x80\xa8"}\r\n\n' + os.urandom(300_000)
    made = api.client.files.create(file=("name ü.jsonl", data), purpose="batch")
    assert (made.bytes, made.purpose, made.status, made.filename) == (
        len(data),
        "batch",
        "processed",
        "name ü.jsonl",
    )
    found = api.client.files.retrieve(made.id)
    assert found == made
    content = api.http.get(f"/v1/files/{made.id}/content")
    assert content.content == data
    assert content.headers["content-length"] == str(len(data))


def test_a_broken_download_goes_on_where_it_broke(api: Api) -> None:
    file_id = api.client.files.create(file=("a", b"0123456789"), purpose="batch").id
    rest = api.http.get(f"/v1/files/{file_id}/content", headers={"Range": "bytes=4-"})
    assert (rest.status_code, rest.content) == (206, b"456789")
    assert rest.headers["content-range"] == "bytes 4-9/10"


def test_an_empty_file_is_a_file(api: Api) -> None:
    file_id = api.client.files.create(file=("empty", b""), purpose="batch").id
    assert api.client.files.content(file_id).read() == b""


def test_a_deleted_file_is_gone(api: Api) -> None:
    file_id = api.upload("a")
    deleted = api.client.files.delete(file_id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file_id, True, "file")
    for call in (api.client.files.retrieve, api.client.files.delete, api.client.files.content):
        with pytest.raises(openai.NotFoundError):
            call(file_id)


def test_deleting_the_input_of_an_unfinished_batch_keeps_its_bytes(api: Api) -> None:
    batch_id = api.create("a")
    file_id = api.client.batches.retrieve(batch_id).input_file_id
    api.client.files.delete(file_id)
    assert api.context.store.size(f"files/{file_id}") is not None
    with pytest.raises(openai.NotFoundError):
        api.client.files.retrieve(file_id)


def test_lists_page_through_everything(api: Api) -> None:
    made = [api.upload("a") for _ in range(5)]
    other = api.upload("a", purpose="user_data")
    assert [file.id for file in api.client.files.list(limit=2)] == sorted([*made, other], reverse=True)
    assert [file.id for file in api.client.files.list(limit=2, order="asc", purpose="batch")] == sorted(made)
    assert [file.id for file in api.client.files.list(purpose="user_data")] == [other]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=0", "integer_below_min_value"),
        ("limit=10001", "integer_above_max_value"),
        ("limit=x", "invalid_value"),
        ("order=up", "invalid_value"),
        ("after=x", "invalid_value"),
    ],
)
def test_a_wrong_query_is_refused_by_name(api: Api, query: str, code: str) -> None:
    answer = api.http.get(f"/v1/files?{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, query.partition("=")[0], code)


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({"file": ("a", b"x")}, {}, "purpose"),
        ({"file": ("a", b"x")}, {"purpose": "nope"}, "purpose"),
        ({"other": ("a", b"x")}, {"purpose": "batch"}, "other"),
        ({"file": (None, b"x")}, {"purpose": "batch"}, "file"),
        ({"purpose": (None, b"batch")}, {}, "file"),
        (
            {"file": ("a", b"x")},
            {"purpose": "batch", "expires_after[anchor]": "created_at"},
            "expires_after[seconds]",
        ),
        (
            {"file": ("a", b"x")},
            {"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "3600"},
            "expires_after[anchor]",
        ),
        (
            {"file": ("a", b"x")},
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
            "expires_after[seconds]",
        ),
    ],
)
def test_a_wrong_form_is_refused_by_name(api: Api, files: Any, data: Any, param: str) -> None:
    answer = api.http.post("/v1/files", files=files, data=data)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert list(api.context.store.list("file")) == []


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{}", "application/json"),
        (b"junk", "multipart/form-data"),
        (b"junk", "multipart/form-data; boundary=b"),
        (b"--b\r\n", "multipart/form-data; boundary=b"),
        (b"", "multipart/form-data; boundary=b"),
    ],
)
def test_a_body_that_is_no_form_is_refused(api: Api, content: bytes, kind: str) -> None:
    answer = api.http.post("/v1/files", content=content, headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_expires_after_is_honoured(api: Api) -> None:
    made = api.client.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600


@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_over_the_limit_is_refused_with_the_limit_and_its_setting(api: Api, chunked: bool) -> None:
    limit = api.context.settings.max_file_bytes
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body = [head, b"x" * (limit + 1), b"\r\n--b--\r\n"]
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = api.http.post("/v1/files", content=iter(body) if chunked else b"".join(body), headers=kind)
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert str(limit) in error["message"]
    assert "LONGHAUL_MAX_FILE_BYTES" in error["message"]
    assert list(api.context.store.list("file")) == []
    body[1] = b"x" * limit
    assert api.http.post("/v1/files", content=b"".join(body), headers=kind).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_far_over_the_limit_is_refused_while_it_arrives(api: Api, chunked: bool) -> None:
    data = b"x" * 4_000_000
    content: Any = iter([data]) if chunked else data
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    content = iter([head, data]) if chunked else head + data
    answer = api.http.post("/v1/files", content=content, headers=kind)
    assert answer.status_code == 413


def test_memory_stays_flat_while_a_large_file_is_uploaded(serve: Callable[..., Api]) -> None:
    api = serve(max_file_bytes=200_000_000)
    block = b"x" * 1_000_000

    def body() -> Any:
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        yield b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(100):
            yield block
        yield b"\r\n--b--\r\n"

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = api.http.post("/v1/files", content=body(), headers=kind)
    assert answer.json()["bytes"] == 100_000_000
    with api.http.stream("GET", f"/v1/files/{answer.json()['id']}/content") as content:
        assert sum(len(chunk) for chunk in content.iter_bytes()) == 100_000_000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40_000, f"{grown} KiB"


def test_a_client_that_goes_away_leaves_nothing(api: Api) -> None:
    def body() -> Any:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        httpx.post(
            f"{api.url}/v1/files", content=body(), headers={"Content-Type": "multipart/form-data; boundary=b"}
        )
    assert list(api.context.store.list("file")) == []
    assert api.http.get("/healthz").status_code == 200
