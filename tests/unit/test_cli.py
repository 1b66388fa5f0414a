"""The `longhaul` command against a small API in memory."""

import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import httpx
import orjson
import pytest
from click.testing import CliRunner, Result

from jobs import cli, client, commands, errors, ids, settings, stack
from tests.unit.test_client import batch

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
OK = b'{"id":"1","custom_id":"a","response":{"status_code":200},"error":null}\n'
BAD = b'{"id":"2","custom_id":"b","response":{"status_code":400},"error":null}\n'
LOST = b'{"id":"3","custom_id":"c","response":null,"error":{"code":"worker_lost"}}\n'


class Api:
    """An API with one job, whose states are given one a poll; the last one stays."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.states = list(states or [{"status": "completed"}])
        self.files = {"file-out": OK, "file-err": BAD}
        self.created: list[tuple[dict[str, Any], str]] = []
        self.uploads: list[str] = []
        self.pages: dict[str | None, tuple[bytes, str, str]] = {
            None: (OK + BAD, "1", "in_progress"),
            "1": (b"", "1b", "in_progress"),
            "1b": (LOST, "2", "completed"),
        }

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body, path = request.read(), request.url.path
        match request.method, path.removeprefix("/v1/").split("/"):
            case "POST", ["files"]:
                name = body.split(b'filename="')[1].split(b'"')[0].decode()
                self.uploads.append(name)
                return httpx.Response(200, json={"id": f"file-{len(self.uploads)}"})
            case "GET", ["files"]:
                data = [
                    {"id": f"file-{i + 1}", "filename": n, "bytes": 75} for i, n in enumerate(self.uploads)
                ]
                return httpx.Response(200, json={"data": data, "has_more": False, "last_id": None})
            case "GET", ["files", name, "content"]:
                if name in self.files:
                    return httpx.Response(200, content=self.files[name])
            case "POST", ["batches"]:
                self.created.append((orjson.loads(body), request.headers["Idempotency-Key"]))
                return httpx.Response(200, json=batch(status="validating"))
            case "GET", ["batches"]:
                page = {"data": [batch(), batch(id="batch_2", model="m")], "has_more": False, "last_id": "x"}
                return httpx.Response(200, json=page)
            case "POST", ["batches", _, "cancel"]:
                return httpx.Response(200, json=batch(status="cancelling"))
            case "GET", ["batches", _, "results"]:
                return self.results(request.url.params.get("after"))
            case "GET", ["batches", _]:
                state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
                return httpx.Response(200, json=batch(**state))
        return httpx.Response(404, json=errors.NotFound(what="path", id=path).body())

    def results(self, after: str | None) -> httpx.Response:
        if after not in self.pages:
            return httpx.Response(409, json=errors.Conflict("That cursor is void.").body())
        content, cursor, status = self.pages[after]
        headers = {client.CURSOR_HEADER: cursor, client.STATUS_HEADER: status}
        return httpx.Response(200, content=content, headers=headers)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    served = Api()
    connect(monkeypatch, served)
    return served


def connect(monkeypatch: pytest.MonkeyPatch, handler: Any) -> None:
    def make(url: str, key: str | None, **options: Any) -> client.Client:
        return client.Client(
            url, key, transport=httpx.MockTransport(handler), sleep=lambda _: None, **options
        )

    monkeypatch.setattr(commands.Session, "new_client", staticmethod(make))
    monkeypatch.setattr(commands.Session, "poll_seconds", 0.0)


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(cli.main, arguments, **options)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(LINE)
    return str(path)


def test_submit_prints_the_id_and_takes_the_endpoint_from_the_first_line(api: Api, prompts: str) -> None:
    result = run("submit", prompts, "--metadata", "team=a=b", "--priority", "3", "--window", "2h")
    assert (result.exit_code, result.stdout) == (0, "batch_1\n")
    assert api.uploads == ["prompts.jsonl"]
    assert api.created[0][0] == {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "2h",
        "metadata": {"team": "a=b"},
        "priority": 3,
    }


def test_two_submissions_are_two_jobs_unless_a_key_is_given(api: Api, prompts: str) -> None:
    for _ in range(2):
        run("submit", prompts)
    (first, key), (second, other) = api.created
    assert first["input_file_id"] != second["input_file_id"]
    assert key != other


def test_same_key_and_same_file_send_the_same_create(api: Api, prompts: str) -> None:
    for _ in range(2):
        assert run("submit", prompts, "--idempotency-key", "k").exit_code == 0
    assert api.created[0] == api.created[1]
    assert api.created[0][1] == "k"
    assert len(api.uploads) == 1


def test_submit_reads_standard_input(api: Api) -> None:
    assert run("submit", "-", input=LINE).exit_code == 0
    assert api.uploads == ["stdin.jsonl"]


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), (b"", "is empty"), ("directory", "Is a directory")]
)
def test_file_that_cannot_be_submitted_is_refused_before_anything_is_sent(
    api: Api, tmp_path: Path, content: bytes | str | None, words: str
) -> None:
    path = tmp_path / "in.jsonl"
    if content == "directory":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    result = run("submit", str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith("longhaul: ")
    assert words in result.stderr
    assert not api.uploads


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- text: What is it?\n", "in.yaml: line 1 is not JSON. FILE has one request a line"),
        (b"\n \r\n{'a': 1}\n{}\n", "in.yaml: line 3 is not JSON."),
        (b"\xff\xfe{\x00", "in.yaml: line 1 is not JSON."),
        (b"[1]\n", "in.yaml: line 1 is not a JSON object."),
        (b"3", "in.yaml: line 1 is not a JSON object."),
    ],
)
def test_a_file_of_something_else_is_refused_before_anything_is_sent(
    api: Api, tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "in.yaml"
    path.write_bytes(content)
    named, piped = run("submit", str(path)), run("submit", "-", input=content)
    assert (named.exit_code, piped.exit_code) == (1, 1)
    assert words in named.stderr
    assert words.replace("in.yaml", "standard input") in piped.stderr
    assert not api.uploads


ODD = [b'{"url": ["x"]}\n', b"\n", b'{"a": "\\ud800"}\n', b'\xef\xbb\xbf{"a": 1e999}\nnot JSON\n']


@pytest.mark.parametrize("first", ODD)
def test_odd_first_line_is_left_to_the_server(api: Api, tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(first)
    assert run("submit", str(path)).exit_code == 0
    assert api.created[0][0]["endpoint"] == "/v1/chat/completions"


def counts(completed: int, failed: int, total: int = 2) -> dict[str, int]:
    return {"total": total, "completed": completed, "failed": failed}


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"status": "in_progress", "request_counts": counts(0, 1)}, 0),
        ({"status": "completed", "request_counts": counts(2, 0)}, 0),
        ({"status": "completed", "request_counts": counts(1, 1)}, 3),
        ({"status": "completed", "request_counts": counts(0, 2)}, 3),
        ({"status": "failed"}, 4),
        ({"status": "expired", "request_counts": counts(1, 1)}, 4),
        ({"status": "cancelled", "request_counts": counts(1, 0)}, 4),
    ],
)
@pytest.mark.parametrize("command", ["status", "results"])
def test_exit_code_tells_how_a_job_ended(api: Api, state: dict[str, Any], code: int, command: str) -> None:
    api.states = [state]
    if command == "results" and state["status"] == "in_progress":
        code = 1
    assert run(command, "batch_1").exit_code == code


def test_watch_reports_progress_on_stderr_and_the_end_on_stdout(api: Api) -> None:
    api.states = [
        {"request_counts": counts(0, 0)},
        {"status": "completed", "request_counts": counts(1, 1)},
    ]
    result = run("watch", "batch_1")
    assert result.exit_code == 3
    assert result.stderr.startswith("in_progress 0/2\ncompleted 2/2")
    assert "1 completed, 1 failed of 2" in result.stdout


def test_watch_json_prints_batches_only(api: Api) -> None:
    api.states = [{}, {"status": "completed", "request_counts": counts(2, 0)}]
    result = run("watch", "batch_1", "--json")
    assert [orjson.loads(line)["status"] for line in result.stdout.splitlines()] == [
        "in_progress",
        "completed",
    ]


@pytest.mark.parametrize("command", ["status", "watch", "results"])
def test_a_job_that_was_stopped_tells_how_many_requests_never_ran(api: Api, command: str) -> None:
    api.states = [{"status": "cancelled", "request_counts": counts(1, 0, 60)}]
    result = run(command, "batch_1")
    assert "1 completed, 0 failed of 60, 59 never ran; " in result.stdout + result.stderr


def test_a_job_that_ran_to_its_end_says_nothing_of_what_never_ran(api: Api) -> None:
    api.states = [{"status": "completed", "request_counts": counts(59, 1, 60)}]
    assert "never" not in run("status", "batch_1").stdout


@pytest.mark.parametrize(
    ("workers", "words"),
    [([], "no worker"), ([{"state": "loading", "models": ["m"]}], "a worker is loading the model m, ")],
)
def test_status_tells_what_a_job_waits_for(
    monkeypatch: pytest.MonkeyPatch, workers: list[dict[str, Any]], words: str
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        job = batch(model="m")
        answers = {"/v1/queue": {"workers": len(workers)}, "/v1/workers": {"data": workers}}
        return httpx.Response(200, json=answers.get(request.url.path, job))

    connect(monkeypatch, answer)
    result = run("status", "batch_1")
    assert result.exit_code == 0
    assert f"batch_1 waits: {words}" in result.stderr


def test_failed_job_shows_its_line_errors(api: Api) -> None:
    api.states = [
        {
            "status": "failed",
            "errors": {"data": [{"code": "invalid_url", "message": "No.", "line": 3}]},
        }
    ]
    result = run("status", "batch_1")
    assert "line 3: No. (invalid_url)" in result.stdout


def test_ctrl_c_stops_the_watching_and_says_that_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(request: httpx.Request) -> httpx.Response:
        os.kill(os.getpid(), signal.SIGINT)
        return httpx.Response(200, json=batch())

    connect(monkeypatch, interrupt)
    result = run("watch", "batch_1")
    assert result.exit_code == 130
    assert "the job goes on" in result.stderr
    assert "longhaul watch batch_1" in result.stderr


def test_submit_and_watch_in_one(api: Api, prompts: str) -> None:
    result = run("submit", prompts, "--watch")
    assert result.exit_code == 0
    assert result.stdout.startswith("batch_1\nbatch_1 completed")


ENDED = {"status": "completed", "output_file_id": "file-out", "error_file_id": "file-err"}


def test_results_go_to_standard_output_byte_for_byte(api: Api) -> None:
    api.states = [ENDED]
    assert run("results", "batch_1").stdout_bytes == OK
    assert run("results", "batch_1", "--errors").stdout_bytes == BAD


@pytest.mark.parametrize("place", ["new/", "old"])
@pytest.mark.parametrize("others", [{}, {"metrics": b"{}\n", "summary": b"{}"}])
def test_results_into_a_directory_write_all_files_that_there_are(
    api: Api, tmp_path: Path, place: str, others: dict[str, bytes]
) -> None:
    api.states = [ENDED]
    api.files |= {ids.result_file_id("batch_1", kind): data for kind, data in others.items()}
    (tmp_path / "old").mkdir()
    result = run("results", "batch_1", "-o", f"{tmp_path}/{place}", "--json")
    written = orjson.loads(result.stdout)["files"]
    assert Path(written["output"]).read_bytes() == OK
    assert Path(written["errors"]).read_bytes() == BAD
    assert Path(written["output"]).name == "batch_1.jsonl"
    assert {kind: Path(written[kind]).read_bytes() for kind in others} == others
    assert set(map(Path, written.values())) == set((tmp_path / place).iterdir())


def test_results_replace_nothing_that_is_no_file(api: Api, tmp_path: Path) -> None:
    api.states = [ENDED]
    os.mkfifo(tmp_path / "pipe")
    result = run("results", "batch_1", "-o", str(tmp_path / "pipe"))
    assert (result.exit_code, (tmp_path / "pipe").is_fifo()) == (1, True)
    assert "without -o lines go to standard output" in result.stderr


def test_results_into_a_file_leave_it_empty_when_there_is_no_line(api: Api, tmp_path: Path) -> None:
    api.states = [ENDED | {"output_file_id": None}]
    path = tmp_path / "out.jsonl"
    path.write_text("of another run")
    assert run("results", "batch_1", "-o", str(path)).exit_code == 0
    assert path.read_bytes() == b""


def test_interrupted_download_leaves_the_old_file(api: Api, tmp_path: Path) -> None:
    api.states = [ENDED]
    del api.files["file-out"]
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    assert run("results", "batch_1", "-o", str(path)).exit_code == 1
    assert [child.read_text() for child in tmp_path.iterdir()] == ["old"]


def test_results_of_a_running_job_say_what_to_do(api: Api) -> None:
    api.states = [{"request_counts": counts(1, 0)}]
    result = run("results", "batch_1")
    assert result.exit_code == 1
    assert "1 of 2" in result.stderr
    assert "longhaul watch batch_1" in result.stderr
    assert "--follow" in result.stderr


def test_place_that_cannot_be_written_is_named(api: Api, tmp_path: Path) -> None:
    api.states = [ENDED]
    (tmp_path / "file").touch()
    result = run("results", "batch_1", "-o", f"{tmp_path}/file/x")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


class Turns(dict[str | None, tuple[bytes, str, str]]):
    """Pages whose first one is another each time it is asked for."""

    def __init__(self, others: Any, first: list[tuple[bytes, str, str]]) -> None:
        super().__init__(others)
        self.first = list(first)
        self[None] = first[0]

    def __getitem__(self, key: str | None) -> tuple[bytes, str, str]:
        return self.first.pop(0) if key is None else super().__getitem__(key)


def test_follow_sorts_lines_by_kind_and_ends_with_the_job(api: Api, tmp_path: Path) -> None:
    api.states = [{"status": "completed", "request_counts": counts(1, 2, 3)}]
    result = run("results", "batch_1", "--follow", "-o", f"{tmp_path}/")
    assert result.exit_code == 3
    assert (tmp_path / "batch_1.jsonl").read_bytes() == OK
    assert (tmp_path / "batch_1.errors.jsonl").read_bytes() == BAD + LOST


def test_follow_writes_each_line_once_when_the_queue_was_rebuilt(api: Api) -> None:
    api.states = [ENDED]
    # Another order, and a cursor that is not known any more.
    del api.pages["1"]
    pages = [api.pages[None], (BAD + LOST + OK, "3", "completed")]
    api.pages = Turns(api.pages, pages)
    assert run("results", "batch_1", "--follow").stdout_bytes == OK
    api.pages = Turns({}, pages)
    assert run("results", "batch_1", "--follow", "--errors").stdout_bytes == BAD + LOST


def test_results_json_needs_a_place(api: Api) -> None:
    assert run("results", "batch_1", "--json").exit_code == 2


def test_cancel_prints_the_new_state(api: Api) -> None:
    assert run("cancel", "batch_1").stdout == "batch_1 cancelling\n"


def test_list_prints_one_job_a_line_below_a_heading(api: Api) -> None:
    head, *rows = run("list").stdout.splitlines()
    assert head.split() == ["JOB", "STATE", "DONE", "FAILED", "CREATED", "MODEL"]
    assert [row.split()[0] for row in rows] == ["batch_1", "batch_2"]
    assert [orjson.loads(line)["id"] for line in run("list", "--json").stdout.splitlines()] == [
        "batch_1",
        "batch_2",
    ]


def test_server_that_is_not_there_is_exit_code_5(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    connect(monkeypatch, refuse)
    result = run("status", "batch_1", env={"LONGHAUL_API_URL": "http://host:1"})
    assert result.exit_code == 5
    assert "longhaul: No usable answer from http://host:1: Connection refused" in result.stderr
    assert "Traceback" not in result.output


def test_client_variables_do_not_break_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_API_URL", "http://host:1")
    monkeypatch.setenv("LONGHAUL_API_KEY", "k")
    settings.Settings.load()


@pytest.mark.parametrize(
    "name",
    ["up", "submit", "status", "watch", "results", "cancel", "list", "delete", "recover", "sweep", "keys"],
)
def test_help_has_an_example(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"longhaul {name}" in result.output.split("\n", 1)[1]


class Plugin(metadata.EntryPoint):
    """An entry point that counts how often it is loaded."""

    loads = 0

    def load(self) -> Any:
        Plugin.loads += 1
        if self.value == "absent":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

        @click.command("run")
        @click.option("--model")
        def command(model: str) -> None:
            """Run it here."""
            click.echo(f"ran {model}")
            if model == "late":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")

        return command


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> type[Plugin]:
    point = Plugin("run", getattr(request, "param", "present"), cli.PLUGINS)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    monkeypatch.setattr(Plugin, "loads", 0)
    return Plugin


def test_listing_the_commands_imports_no_plugin(plugin: type[Plugin]) -> None:
    result = run("--help")
    assert "run " in result.output
    assert plugin.loads == 0


def test_plugin_is_loaded_when_it_is_used_or_explained(plugin: type[Plugin]) -> None:
    assert run("run", "--model", "m").output == "ran m\n"
    assert "Run it here." in run("run", "--help").output
    assert plugin.loads == 2


@pytest.mark.parametrize(("plugin", "model"), [("absent", "m"), ("present", "late")], indirect=["plugin"])
def test_missing_extra_is_named(plugin: type[Plugin], model: str) -> None:
    result = run("run", "--model", model)
    assert result.exit_code == 1
    assert result.stderr == (
        "longhaul: 'longhaul run' needs the module 'torch'. Install it: pip install 'longhaul[worker]'\n"
    )


class FakeStack:
    """Notes what it is started with and is interrupted at once."""

    started: dict[str, Any] = {}
    api_url = "http://127.0.0.1:1"
    directory = Path("/d")

    def __init__(self, directory: Path, **options: Any) -> None:
        FakeStack.started = {"directory": directory, **options}

    def __enter__(self) -> "FakeStack":
        return self

    def __exit__(self, *_: object) -> None:
        FakeStack.started["stopped"] = True

    def describe(self) -> str:
        return "what runs"

    def others(self, directory: Path, gpus: int) -> list[str]:
        return []

    def wait(self, report: Any) -> None:
        raise KeyboardInterrupt


def test_up_serves_the_models_it_is_given_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "Stack", FakeStack)
    source = tmp_path / "m=1.gguf"
    source.write_bytes(b"GGUF")
    (tmp_path / "environment").write_text(f"LONGHAUL_STORE_URL=file://{tmp_path}/objects\n")
    options = ("--workers", "2", "--port", "0", "--dir", str(tmp_path))
    result = run("up", "--model", f"m={source}", *options)
    assert result.exit_code == 0
    assert FakeStack.started["models"] == {"m": {"source": str(source)}}
    assert FakeStack.started["stopped"]
    assert "export LONGHAUL_API_URL=http://127.0.0.1:1" in result.stdout


@pytest.mark.parametrize("arguments", [["up"], ["up", "--model", "m"], ["submit"], ["list", "--limit", "0"]])
def test_wrong_usage_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.delenv("LONGHAUL_MODELS", raising=False)
    assert run(*arguments).exit_code == 2


def test_importing_the_command_loads_no_model_library() -> None:
    code = "import sys, jobs.cli; print({'torch', 'transformers', 'api', 'worker'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
