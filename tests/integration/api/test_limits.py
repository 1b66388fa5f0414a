"""What a head, a body, a path may be: more is refused in the contract's shape, and nothing stays behind."""

import gzip
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import orjson
import pytest

from api.errors import ErrorBody
from tests.integration.api.serving import Api, line, until
from tests.integration.api.sockets import connected, refused, trickle

FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
UPLOAD = (
    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    b"Content-Length: 900000\r\n\r\n"
)


def error(answer: httpx.Response, status: int, code: str) -> str:
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    return ErrorBody.model_validate(answer.json(), strict=True).error.message


def form(*parts: tuple[bytes, bytes]) -> bytes:
    """Return a form with boundary b; each part is what follows `form-data; ` in its head, and a value."""
    made = [b"--b\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + value for head, value in parts]
    return b"\r\n".join([*made, b"--b--\r\n"])


def post_form(api: Api, content: bytes, kind: str = "multipart/form-data; boundary=b") -> httpx.Response:
    return api.http.post("/v1/files", content=content, headers={"Content-Type": kind})


# Heads.


def test_many_or_large_headers_are_431(api: Api) -> None:
    many = {f"x-{number}": "1" for number in range(100)}
    error(api.http.get("/healthz", headers=many), 431, "headers_too_large")
    error(api.http.get("/healthz", headers={"x": "y" * 17_000}), 431, "headers_too_large")


def test_a_head_without_end_is_431_and_not_gathered(api: Api) -> None:
    with connected(api) as opened:
        opened.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40_000)
        refused(opened, 431, "headers_too_large")


def test_a_long_path_or_query_is_414(api: Api) -> None:
    error(api.http.get("/v1/files/" + "x" * 5000), 414, "uri_too_long")
    error(api.http.get("/v1/files", params={"after": "x" * 5000}), 414, "uri_too_long")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"hello\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\x00\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_the_contracts_shape(api: Api, garbage: bytes) -> None:
    with connected(api) as opened:
        opened.sendall(garbage)
        refused(opened, 400, "invalid_value")


def test_an_unknown_transfer_encoding_is_501_in_the_contracts_shape(api: Api) -> None:
    with connected(api) as opened:
        opened.sendall(b"POST /v1/batches HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n")
        refused(opened, 501, "invalid_value")


def test_garbage_in_place_of_a_chunk_ends_the_request_and_not_the_server(api: Api) -> None:
    with connected(api) as opened:
        opened.sendall(
            b"POST /v1/batches HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\nzzz\r\n"
        )
        refused(opened, 400, "invalid_value")
    assert api.http.get("/healthz").status_code == 200


# Patience.


def test_a_head_that_does_not_end_is_cut_off(serve: Callable[..., Api]) -> None:
    api = serve(upload_idle_seconds=0.5)
    with connected(api) as silent, connected(api) as slow:
        trickle(slow, b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 200, 5)
        refused(slow, 408, "request_timeout")
        assert silent.recv(1) == b""


def test_many_unfinished_heads_do_not_keep_a_client_out(serve: Callable[..., Api]) -> None:
    api = serve(upload_idle_seconds=60)
    with ExitStack() as stack:
        opened = [stack.enter_context(connected(api)) for _ in range(300)]
        for one in opened:
            one.sendall(b"GET /")
        began = time.monotonic()
        assert api.http.get("/healthz").status_code == 200
        assert time.monotonic() - began < 2


def test_of_too_many_that_wait_the_oldest_goes(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 20))
    api = serve(upload_idle_seconds=60)
    with ExitStack() as stack:
        opened = [stack.enter_context(connected(api)) for _ in range(30)]
        assert opened[0].recv(1) == b""
        assert api.http.get("/healthz").status_code == 200
        opened[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert opened[-1].recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_a_body_of_which_nothing_comes_is_408(serve: Callable[..., Api], path: str) -> None:
    api = serve(upload_idle_seconds=0.3)
    with connected(api) as opened:
        opened.sendall(UPLOAD.replace(b"/v1/files", path.encode()).replace(b"900000", b"90000") + FORM)
        began = time.monotonic()
        message = refused(opened, 408, "request_timeout").error.message
        assert time.monotonic() - began < 3
        assert "LONGHAUL_UPLOAD_IDLE_SECONDS" in message


def test_a_body_that_comes_drop_by_drop_is_408(serve: Callable[..., Api]) -> None:
    api = serve(upload_idle_seconds=0.5)
    with connected(api) as opened:
        opened.sendall(UPLOAD)
        trickle(opened, FORM + b"x" * 400, 10)
        refused(opened, 408, "request_timeout")


def test_a_body_that_nobody_reads_does_not_hold_the_connection(serve: Callable[..., Api]) -> None:
    api = serve(upload_idle_seconds=0.5)
    with connected(api) as opened:
        opened.sendall(b"POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        until(lambda: opened.recv(1 << 16).endswith(b"}}"))
        trickle(opened, b"x" * 1000, 10)
        assert opened.recv(1) == b""


def test_a_slow_but_steady_upload_is_taken(serve: Callable[..., Api]) -> None:
    api = serve(upload_idle_seconds=0.5)

    def pieces() -> list[bytes]:
        return [FORM, *[b"x" * 1000] * 10, b"\r\n--b--\r\n"]

    def slowly() -> object:
        for piece in pieces():
            time.sleep(0.1)
            yield piece

    answer = api.http.post(
        "/v1/files",
        content=slowly(),  # type: ignore[arg-type]
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    )
    assert (answer.status_code, answer.json()["bytes"]) == (200, 10_000)


def test_an_upload_that_breaks_off_leaves_nothing(serve: Callable[..., Api], tmp_path: Path) -> None:
    api = serve(upload_idle_seconds=0.5, max_file_bytes=100_000_000)
    before = spooled()
    big = UPLOAD.replace(b"900000", b"9000000") + FORM + b"x" * 3_000_000
    with connected(api) as gone, connected(api) as slow:
        for opened in (gone, slow):
            opened.sendall(big)
        until(lambda: spooled() == before + 2)
        gone.close()
        refused(slow, 408, "request_timeout")
    until(lambda: spooled() == before)
    kept = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert kept == []


def spooled() -> int:
    """Return how many files without a name this process holds."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "(deleted)" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found


def test_a_reader_that_does_not_read_pins_no_memory_and_is_cut_off(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.protocol._STALLED_SECONDS", 1)
    api = serve(max_file_bytes=100_000_000)
    file_id = api.client.files.create(file=("a", bytes(60_000_000)), purpose="batch").id
    before = resident()
    with ExitStack() as stack:
        readers = [stack.enter_context(connected(api)) for _ in range(4)]
        for reader in readers:
            reader.sendall(f"GET /v1/files/{file_id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        time.sleep(0.5)
        assert resident() - before < 40_000_000
        time.sleep(1.5)
        for reader in readers:
            assert received(reader) < 30_000_000


def received(opened: socket.socket) -> int:
    """Read to the end; return how many bytes came."""
    total = 0
    with suppress(ConnectionResetError):
        while data := opened.recv(1 << 20):
            total += len(data)
    return total


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# Bodies.


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "x-gzip", "identity, gzip"])
def test_a_compressed_body_is_415(api: Api, encoding: str) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    for path in ("/v1/files", "/v1/batches", "/v1/batches/x/cancel"):
        answer = api.http.post(path, content=bomb, headers={"Content-Encoding": encoding})
        assert encoding in error(answer, 415, "unsupported_content_encoding")


def test_a_body_that_says_identity_is_read(api: Api) -> None:
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [line("a")]}
    answer = api.http.post("/v1/batches", json=body, headers={"Content-Encoding": "identity"})
    assert answer.status_code == 200


@pytest.mark.parametrize("levels", [250, 900, 20_000])
def test_a_body_that_nests_deeply_is_refused(api: Api, levels: int) -> None:
    deep = b"[" * levels + b"]" * levels
    for body in (deep, b'{"requests": [{"body": ' + deep + b"}]}", b'{"metadata": {"a": ' + deep + b"}}"):
        error(api.http.post("/v1/batches", content=body), 400, "invalid_json")


@pytest.mark.parametrize("text", ["\0", "\x1b[2J", "\u202e", "\r\nX-Evil: 1", "\U0001f600", ""])
def test_metadata_is_any_text_and_comes_back_as_it_was(api: Api, text: str) -> None:
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [line("a")]}
    answer = api.http.post("/v1/batches", json=body | {"metadata": {text: text}})
    assert answer.status_code == 200, answer.text
    read = api.http.get(f"/v1/batches/{answer.json()['id']}")
    assert read.json()["metadata"] == {text: text}


@pytest.mark.parametrize("key", [r"\ud800", "k" * 1_000, r"\u0000" * 65])
def test_metadata_that_is_no_text_or_has_a_huge_key_is_refused(api: Api, key: str) -> None:
    body = b'{"endpoint": "/v1/embeddings", "completion_window": "24h", "requests": [{}],'
    body += b' "metadata": {"K": "v"}}'
    answer = api.http.post("/v1/batches", content=body.replace(b"K", key.encode()))
    assert answer.status_code == 400
    ErrorBody.model_validate(answer.json(), strict=True)


# Forms.

PURPOSE = (b'name="purpose"', b"batch")
FILE = (b'name="file"; filename="a"', b"x")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (form(FILE, PURPOSE), "multipart/form-data"),
        (form(FILE, PURPOSE), "multipart/form-data; boundary="),
        (form(FILE, PURPOSE), "multipart/form-data; boundary=" + "b" * 10_000),
        (form(FILE, PURPOSE), "multipart/mixed; boundary=b"),
        (form(FILE, PURPOSE), "multipart/form-data; boundary=b; charset=unicode_escape"),
        (form(FILE, PURPOSE), "multipart/form-data; boundary=b; charset=punycode"),
        (form(FILE, FILE, PURPOSE), "multipart/form-data; boundary=b"),
        (form(FILE, PURPOSE, PURPOSE), "multipart/form-data; boundary=b"),
        (form(FILE, (b'name="file"', b"x"), PURPOSE), "multipart/form-data; boundary=b"),
        (form(FILE, *[(b'name="x%d"' % n, b"") for n in range(2000)]), "multipart/form-data; boundary=b"),
        (form(FILE, (b'name="purpose"', b"x" * 100_000)), "multipart/form-data; boundary=b"),
        (
            form(FILE, (b'name="purpose"\r\nX: ' + b"y" * 900_000, b"batch")),
            "multipart/form-data; boundary=b",
        ),
        (
            form(FILE, (b'name="purpose"' + b"\r\nX: y" * 50_000, b"batch")),
            "multipart/form-data; boundary=b",
        ),
        (form((b"", b"x")), "multipart/form-data; boundary=b"),
        (
            form((b'name="file"; filename="' + b"n" * 100_000 + b'"', b"x"), PURPOSE),
            "multipart/form-data; boundary=b",
        ),
        (
            b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\n--c--\r\n--b--",
            "multipart/form-data; boundary=b",
        ),
        (form(FILE, PURPOSE)[:-20], "multipart/form-data; boundary=b"),
        (b"", "multipart/form-data; boundary=b"),
        (b"\0" * 10_000, "multipart/form-data; boundary=b"),
    ],
)
def test_a_form_that_is_wrong_is_refused(api: Api, content: bytes, kind: str) -> None:
    answer = post_form(api, content, kind)
    assert answer.status_code == 400, answer.text
    ErrorBody.model_validate(answer.json(), strict=True)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "..\\..\\windows",
        "/etc/passwd",
        "a\0b",
        "a%0d%0aSet-Cookie: x=1",
        "\u202egnp.exe",
        "ü" * 1000,
        "..",
        ";filename=evil",
        "\x7f\x1b[31m",
    ],
)
def test_a_file_name_is_never_a_path_nor_a_header(api: Api, tmp_path: Path, name: str) -> None:
    quoted = name.encode().replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    answer = post_form(api, form((b'name="file"; filename="' + quoted + b'"', b"x"), PURPOSE))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert "/" not in found["filename"]
    assert len(found["filename"]) <= 255
    got = api.http.get(f"/v1/files/{found['id']}/content")
    assert got.content == b"x"
    assert "set-cookie" not in got.headers
    assert got.headers["content-disposition"].isascii()
    assert got.headers["content-disposition"].count("filename") == 1 + ("filename" in name)
    stored = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert stored == {found["id"], f"{found['id']}.json"}


def test_a_file_name_with_line_ends_is_no_header(api: Api) -> None:
    answer = post_form(api, form((b'name="file"; filename="a\r\nX-Evil: 1\r\n"', b"x"), PURPOSE))
    if answer.status_code == 200:
        got = api.http.get(f"/v1/files/{answer.json()['id']}/content")
        assert "x-evil" not in got.headers
    else:
        error(answer, 400, "invalid_value")


def test_a_body_of_many_small_values_does_not_keep_others_waiting(serve: Callable[..., Api]) -> None:
    api = serve(max_inline_bytes=20_000_000, max_file_bytes=20_000_000, max_requests_per_job=500)
    nested = b",".join([b"{}"] * 6_000_000)
    data = b'{"endpoint":"/v1/completions","completion_window":"24h","requests":[' + nested + b"]}"
    waited = []
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=api.url, timeout=60) as other:
        sent = pool.submit(api.http.post, "/v1/batches", content=data, timeout=60)
        while not sent.done():
            began = time.monotonic()
            assert other.get("/healthz").status_code == 200
            waited.append(time.monotonic() - began)
    assert sent.result().json()["error"]["code"] == "too_many_requests"
    # The parser itself lets nobody in between; what looks at each value does.
    assert sum(waited) - max(waited) > max(waited)


def test_large_bodies_are_looked_at_few_at_a_time_and_all_of_them(serve: Callable[..., Api]) -> None:
    api = serve(max_inline_bytes=20_000_000, max_file_bytes=20_000_000, max_requests_per_job=500)
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    body["requests"] = [line(f"r{n}", messages=[{"role": "user", "content": "x" * 3000}]) for n in range(500)]
    data = orjson.dumps(body)
    assert len(data) > 1_000_000
    headers = {"Content-Type": "application/json"}
    with ThreadPoolExecutor(6) as pool:
        answers = list(
            pool.map(lambda _: api.http.post("/v1/batches", content=data, headers=headers), range(6))
        )
    assert [answer.status_code for answer in answers] == [200] * 6
    assert api.http.post("/v1/batches", content=data[:-1], headers=headers).status_code == 400
    assert api.http.post("/v1/batches", content=data, headers=headers).status_code == 200
