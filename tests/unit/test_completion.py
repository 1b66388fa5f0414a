"""Which ids of jobs a shell is offered."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from jobs import cli, completion
from tests.unit.test_client import batch

IDS = ["batch_01aaaaaaaaaaaaaaaaaaaaaaaa", "batch_01bbbbbbbbbbbbbbbbbbbbbbbb"]


class Page(http.server.BaseHTTPRequestHandler):
    """A page of two jobs, for whoever has the key."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer key-of-mine"
        page: Any = {"data": [batch(id=name) for name in IDS], "has_more": False, "last_id": IDS[-1]}
        body = json.dumps(page if known else {"error": {"message": "no"}}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def _told(words: str, **given: Any) -> list[str]:
    context = click.Context(cli.main)
    context.params = given
    return [item.value for item in completion.job_ids(context, click.Argument(["x"]), words)]


def test_ids_are_those_that_begin_so_by_the_key_and_server_of_the_line(server: str) -> None:
    assert _told("batch_01b", url=server, api_key="key-of-mine") == IDS[1:]


def _reports(words: str, **given: Any) -> list[tuple[str, str]]:
    context = click.Context(cli.main)
    context.params = given
    found = completion.reports(context, click.Argument(["x"]), words)
    return [(item.value, item.type) for item in found]


def test_a_report_is_offered_jobs_and_outputs_of_a_run_and_else_files(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    for name in ("out.summary.json", "bath[1].summary.json", "dir/other.summary.json", "notes.txt"):
        (tmp_path / name).touch()
    given = {"url": server, "api_key": "key-of-mine"}
    names = [value for value, _ in _reports("", **given)]
    assert names == [*IDS, "bath[1].jsonl", "out.jsonl"]
    assert _reports("batch_01b", **given) == [(IDS[1], "plain")]
    assert _reports("bath[", **given) == [("bath[1].jsonl", "plain")]
    assert _reports("dir/", **given) == [("dir/other.jsonl", "plain")]
    assert _reports("notes", **given) == [("notes", "file")]
    assert _reports("out.summary", **given) == [("out.summary", "file")]


def test_no_server_and_a_wrong_key_complete_nothing_and_say_nothing(
    server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _told("", url=server, api_key="other") == []
    assert _told("", url="http://127.0.0.1:9") == []
    assert _told("", url="nonsense") == []
    assert capfd.readouterr() == ("", "")
