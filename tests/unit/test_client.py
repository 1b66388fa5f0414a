"""The HTTP client against scripted answers."""

import io
from collections.abc import Iterator

import httpx
import pytest

from jobs import client, errors

URL = "http://longhaul.test"


def batch(**changes: object) -> dict[str, object]:
    return {
        "id": "batch_1",
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-1",
        "completion_window": "24h",
        "status": "in_progress",
        "created_at": 1,
    } | changes


class Server:
    """Answers requests in turn; an exception among the answers is raised instead."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = iter(answers)
        self.requests: list[httpx.Request] = []
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, **options: object) -> client.Client:
        return client.Client(URL, transport=httpx.MockTransport(self), sleep=self.slept.append, **options)


def test_lost_connection_is_tried_again_with_the_same_idempotency_key() -> None:
    server = Server(httpx.ReadError("reset"), httpx.Response(200, json=batch()))
    assert server.client().create({"endpoint": "x"}, "key-1").id == "batch_1"
    assert [request.headers["Idempotency-Key"] for request in server.requests] == ["key-1", "key-1"]
    assert server.requests[0].content == server.requests[1].content


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_overload_is_tried_again_and_told_once_per_try(status: int) -> None:
    told: list[str] = []
    error = {"error": {"message": "later", "type": "server_error", "param": None, "code": None}}
    server = Server(httpx.Response(status, json=error), httpx.Response(200, json=batch()))
    assert server.client(on_retry=told.append).batch("batch_1").status == "in_progress"
    assert told == ["later"]


def test_retry_after_is_honoured_up_to_the_longest_delay() -> None:
    server = Server(
        httpx.Response(503, headers={"Retry-After": "2"}),
        httpx.Response(503, headers={"Retry-After": "3600"}),
        httpx.Response(200, json=batch()),
    )
    server.client(patience_seconds=60).batch("batch_1")
    assert server.slept == [2.0, 5.0]


def test_patience_ends_with_an_error_that_names_the_url() -> None:
    server = Server(*[httpx.ConnectError("refused")] * 50)
    with pytest.raises(client.ServerUnreachable, match=r"http://longhaul\.test: refused"):
        server.client(patience_seconds=5).batch("batch_1")
    assert 5 <= sum(server.slept) <= 10


class Clock:
    """Time that passes while a call hangs."""

    def __init__(self, server: Server, seconds: float) -> None:
        self._server, self._seconds = server, seconds

    def __call__(self) -> float:
        return len(self._server.requests) * self._seconds


def test_calls_that_hang_use_up_the_patience() -> None:
    away = errors.Unavailable("The queue (Redis) does not answer at the moment.").body()
    server = Server(*[httpx.Response(503, json=away)] * 50)
    with pytest.raises(client.ServerBusy, match=r"queue \(Redis\) does not answer.*longhaul doctor"):
        server.client(patience_seconds=5, clock=Clock(server, 10.0)).batch("batch_1")
    assert len(server.requests) == 1


def test_an_upload_that_broke_off_after_minutes_is_tried_again() -> None:
    server = Server(httpx.WriteError("broken pipe"), httpx.Response(200, json={"id": "file-1"}))
    sends = server.client(patience_seconds=5, clock=Clock(server, 300.0))
    assert sends.upload("in.jsonl", io.BytesIO(b"{}")) == "file-1"


def test_a_server_that_takes_a_call_and_says_nothing_is_told_so() -> None:
    server = Server(*[httpx.ReadTimeout("timed out")] * 50)
    with pytest.raises(client.ServerUnreachable, match="it took the call, but gave no answer in 12 s"):
        server.client(patience_seconds=0, read_seconds=12).batch("batch_1")


def test_refusal_is_not_tried_again_and_keeps_the_servers_words() -> None:
    server = Server(httpx.Response(409, json=errors.Conflict("That key had another body.").body()))
    with pytest.raises(client.ServerRefused, match="That key had another body") as caught:
        server.client().create({}, "key")
    assert caught.value.status == 409
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(404, text="<html>"), "HTTP 404 Not Found.*longhaul list"),
        (httpx.Response(200, text="<html>"), "does not answer as a Longhaul API"),
        (httpx.Response(200, json=[]), "no batch|does not answer"),
        (httpx.Response(200, json={"id": "batch_1"}), "no batch: endpoint"),
        (httpx.Response(401, json=errors.Unauthorized().body()), "LONGHAUL_API_KEY"),
    ],
)
def test_odd_answer_becomes_one_clear_error(answer: httpx.Response, words: str) -> None:
    with pytest.raises(client.ServerRefused, match=words):
        Server(answer).client().batch("batch_1")


@pytest.mark.parametrize(
    ("key", "words"), [(None, "asks for an API key"), ("lh_a_b", "does not know this API key")]
)
def test_a_key_that_is_not_known_is_another_fault_than_none(key: str | None, words: str) -> None:
    answer = httpx.Response(401, json=errors.Unauthorized().body())
    api = client.Client("http://x", key, transport=httpx.MockTransport(lambda request: answer))
    with api, pytest.raises(client.ServerRefused, match=words) as caught:
        api.batch("batch_1")
    assert "--api-key or LONGHAUL_API_KEY" in str(caught.value)
    assert "Authorization" not in str(caught.value)


@pytest.mark.parametrize("job_id", ["", "../files", "a/b", "a?b=c", "a%2f"])
def test_id_that_would_change_the_path_is_refused(job_id: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="is not an id"):
        Server().client().batch(job_id)


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://host"])
def test_url_without_a_scheme_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="http://"):
        client.Client(url)


def test_url_may_be_the_one_given_to_openai_clients() -> None:
    assert client.Client("http://host:1/v1/").url == "http://host:1"


def test_key_is_sent_as_bearer() -> None:
    server = Server(httpx.Response(200, json=batch()))
    client.Client(URL, "secret", transport=httpx.MockTransport(server)).batch("batch_1")
    assert server.requests[0].headers["Authorization"] == "Bearer secret"


def test_fields_of_a_newer_server_are_kept() -> None:
    server = Server(httpx.Response(200, json=batch(colour="blue")))
    assert '"colour":"blue"' in server.client().batch("batch_1").model_dump_json()


def test_upload_starts_from_the_beginning_again_after_a_lost_connection() -> None:
    stream = io.BytesIO(b'{"custom_id": "a"}\n')
    server = Server(httpx.WriteError("broken pipe"), httpx.Response(200, json={"id": "file-1"}))
    assert server.client().upload("in.jsonl", stream) == "file-1"
    assert all(b'{"custom_id": "a"}\n' in request.content for request in server.requests)


def test_list_follows_pages_up_to_the_limit() -> None:
    def page(ids: list[int], more: bool) -> httpx.Response:
        data = [batch(id=f"batch_{i}") for i in ids]
        return httpx.Response(200, json={"data": data, "has_more": more, "last_id": f"batch_{ids[-1]}"})

    server = Server(page(list(range(100)), True), page(list(range(100, 200)), True))
    found = server.client().batches(150, after="batch_x")
    assert [b.id for b in found] == [f"batch_{i}" for i in range(150)]
    assert [r.url.params["after"] for r in server.requests] == ["batch_x", "batch_99"]


class Broken(httpx.SyncByteStream):
    """A body whose connection breaks at its end."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self.data
        raise httpx.ReadError("reset")


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_download_goes_on_where_it_broke(ranges: bool) -> None:
    data = bytes(range(256)) * 10

    def rest(start: int) -> httpx.Response:
        return httpx.Response(206, content=data[start:]) if ranges else httpx.Response(200, content=data)

    server = Server(httpx.Response(200, stream=Broken(data[:1000])), rest(1000))
    assert b"".join(server.client().content("file-1")) == data
    assert server.requests[1].headers["Range"] == "bytes=1000-"


def test_download_that_brings_nothing_any_more_ends_with_an_error() -> None:
    server = Server(*(httpx.Response(200, stream=Broken(b"")) for _ in range(3)))
    with pytest.raises(client.ServerUnreachable):
        list(server.client().content("file-1"))


@pytest.mark.parametrize(("name", "found"), [("a", "file-2"), ("b", None)])
def test_uploaded_file_is_found_by_name_and_size(name: str, found: str | None) -> None:
    records = [{"filename": "a", "bytes": 1, "id": "file-1"}, {"filename": "a", "bytes": 2, "id": "file-2"}]
    page = {"data": records, "has_more": False, "last_id": "file-2"}
    assert Server(httpx.Response(200, json=page)).client().uploaded(name, 2) == found


def test_broken_results_answer_is_read_on_without_losing_or_repeating_a_line() -> None:
    cursor = {client.CURSOR_HEADER: "c1", client.STATUS_HEADER: "in_progress"}
    later = {client.CURSOR_HEADER: "c2", client.STATUS_HEADER: "completed"}
    server = Server(
        httpx.Response(200, stream=Broken(b'{"a":1}\n{"b"'), headers=cursor),
        httpx.Response(200, content=b'{"a":1}\n{"b":2}\n{"c":"\xe2\x80\xa8"}\n', headers=later),
    )
    results = server.client().results("batch_1", "c0")
    assert list(results) == [b'{"a":1}', b'{"b":2}', b'{"c":"\xe2\x80\xa8"}']
    assert (results.after, results.ended) == ("c2", True)
    assert [request.url.params["after"] for request in server.requests] == ["c0", "c0"]


def test_empty_results_answer_still_moves_the_cursor() -> None:
    headers = {client.CURSOR_HEADER: "c1", client.STATUS_HEADER: "completed"}
    results = Server(httpx.Response(200, headers=headers)).client().results("batch_1")
    assert list(results) == []
    assert (results.after, results.ended) == ("c1", True)


@pytest.mark.parametrize(
    ("first", "fails"), [(httpx.ReadError("reset"), False), (httpx.Response(404, json={}), True)]
)
def test_deletion_whose_answer_was_lost_is_done(first: httpx.Response | Exception, fails: bool) -> None:
    server = Server(first, httpx.Response(404, json={}))
    if fails:
        with pytest.raises(client.ServerRefused):
            server.client().delete("batch_1")
    else:
        server.client().delete("batch_1")
