"""No command prints an escape sequence where none is wanted: with NO_COLOR, on a dumb terminal, in a pipe."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from jobs import cli, doctor, progress
from jobs.doctor_findings import Finding
from tests.unit import test_cli
from tests.unit.test_client import batch
from tests.unit.test_help import COMMANDS
from tests.unit.test_top_view import worker

FAULTS = {"data": [{"code": "invalid_json", "message": "\x1b[31mNo.", "line": 3}]}
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "autoscale": ("--min", "2", "--max", "1", "--cpus", "1"),
    "cancel": ("batch_1",),
    "completion": ("bash",),
    "delete": ("batch_1",),
    "doctor": ("--dir", "DIR"),  # test_doctor has its findings
    "generate": ("IN", "-o", "DIR", "--model", "/no/model", "--prompt", "{{ custom_id }}"),
    "keys create": ("a",),
    "keys list": (),
    "keys revoke": ("01jx2k5m8q9r3t4v6w7y8z0abc",),
    "list": (),
    "quantize": ("/no/model", "-o", "/proc/o"),
    "queue-keys": (),
    "recover": (),
    "report": ("batch_1", "-o", "DIR/report.html"),
    "results": ("batch_1",),
    "run": ("IN", "-o", "DIR/out.jsonl", "--model", "m", "--engine", "echo"),
    "size": ("/no/model",),
    "status": ("batch_1",),
    "submit": ("IN", "--watch"),
    "sweep": (),
    "top": ("--once",),
    "up": ("--chat-template", "IN"),
    "watch": ("batch_1",),
}


class Api(test_cli.Api):
    """Also tells of the queue and of workers, and of a job whose input was refused."""

    reason: str | None = None
    """Why no worker could load the model."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        match request.method, request.url.path.removeprefix("/v1/").split("/"):
            case "GET", ["batches"]:
                jobs = [batch(status="failed", errors=FAULTS), batch(id="batch_2", model="m")]
                return self.told({"data": jobs, "has_more": False, "last_id": "x"})
            case "GET", ["queue"]:
                models: list[dict[str, Any]] = [
                    {"model": "m", "queued": 5, "leased": 1, "depth": 6, "buckets": {"128": 5}}
                ]
                if self.reason:
                    models[0] |= {"workers": 0, "reason": self.reason}
                return self.told({"models": models, "control": 1, "workers": 1, "failing": []})
            case "GET", ["workers"]:
                return self.told({"data": [worker(models=["m"])], "api_version": "1"})
        return super().__call__(request)

    def told(self, facts: dict[str, Any]) -> httpx.Response:
        return httpx.Response(200, json=facts)


def test_every_command_is_tried() -> None:
    assert ARGUMENTS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("plainly", [{"NO_COLOR": "1"}, {"TERM": "dumb", "NO_COLOR": ""}, None])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_nothing_is_coloured_or_moved(
    name: str, plainly: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    test_cli.connect(monkeypatch, Api({"status": "failed", "errors": FAULTS}))
    monkeypatch.chdir(tmp_path)
    source, place = tmp_path / "in.jsonl", tmp_path / "place"
    source.write_bytes(test_cli.LINE)
    given = [
        word.replace("DIR", str(place)).replace("IN", str(source))
        for word in (*name.split(), *ARGUMENTS[name])
    ]
    store = {"LONGHAUL_STORE_URL": f"file://{tmp_path}/store", "LONGHAUL_REDIS_URL": "redis://127.0.0.1:9/0"}
    # FORCE_COLOR has rich take what is no terminal for one, as color=True has click.
    forced = {} if plainly is None else {"FORCE_COLOR": "1"} | plainly
    if name == "keys list":
        CliRunner().invoke(cli.main, ["keys", "create", "a"], env=store)
    done = CliRunner().invoke(cli.main, given, env=store | forced, color=plainly is not None)
    assert done.output
    assert "\x1b" not in done.output


HOSTILE = "a\x1b[2J\x9b31m\u202eb\r\x07\x7f"
"""Clears the screen, colours, turns the order of letters, begins the line anew, rings."""
SHOWN = "a?[2J?31m?b???"


def test_what_a_job_says_reaches_no_terminal_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"data": [{"code": "invalid", "message": HOSTILE, "line": 3}]}
    test_cli.connect(monkeypatch, Api({"status": "failed", "errors": faults}))
    for command in ("status", "watch"):
        assert SHOWN in CliRunner().invoke(cli.main, [command, "batch_1"]).output
    monkeypatch.setattr(Api, "reason", HOSTILE)
    test_cli.connect(monkeypatch, Api({"status": "in_progress", "model": "m"}))
    waiting = CliRunner().invoke(cli.main, ["status", "batch_1"])
    assert f"no worker runs m: {SHOWN}" in waiting.output


def test_notes_errors_and_findings_are_printed_without_what_moves(capsys: pytest.CaptureFixture[str]) -> None:
    cli.Failure(f"{HOSTILE}\nand more").show()
    for view in (progress.Lines(), progress.JsonLines(), progress.Bar()):
        view.note(HOSTILE)
    doctor._print(Finding("model", HOSTILE, "wrong", HOSTILE, HOSTILE), as_json=False)
    found = capsys.readouterr()
    assert found.err.splitlines() == [f"longhaul: {SHOWN}", "and more", *[SHOWN] * 3]
    assert found.out.count(SHOWN) == 3
