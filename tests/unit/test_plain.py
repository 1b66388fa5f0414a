"""No command prints an escape sequence where none is wanted: with NO_COLOR, on a dumb terminal, in a pipe."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from jobs import cli
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

    def __call__(self, request: httpx.Request) -> httpx.Response:
        match request.method, request.url.path.removeprefix("/v1/").split("/"):
            case "GET", ["batches"]:
                jobs = [batch(status="failed", errors=FAULTS), batch(id="batch_2", model="m")]
                return self.told({"data": jobs, "has_more": False, "last_id": "x"})
            case "GET", ["queue"]:
                models = [{"model": "m", "queued": 5, "leased": 1, "depth": 6, "buckets": {"128": 5}}]
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
    assert "\x1b" not in done.output.replace("\x1b[31mNo.", "")
