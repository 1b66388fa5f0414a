"""Completion in a real shell: commands, options, and ids of jobs from a server that answers."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from jobs import cli, completion
from tests.unit.test_client import batch

ROOT = Path(__file__).parents[2]
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


@pytest.fixture
def longhaul(tmp_path: Path) -> dict[str, str]:
    """An environment in which `longhaul` is this checkout's."""
    program = tmp_path / "bin" / "longhaul"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom jobs.entry import main\nmain()\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


def _told(words: str, **given: Any) -> list[str]:
    context = click.Context(cli.main)
    context.params = given
    return [item.value for item in completion.job_ids(context, click.Argument(["x"]), words)]


def test_ids_are_those_that_begin_so_by_the_key_and_server_of_the_line(server: str) -> None:
    assert _told("batch_01b", url=server, api_key="key-of-mine") == IDS[1:]


def test_no_server_and_a_wrong_key_complete_nothing_and_say_nothing(
    server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _told("", url=server, api_key="other") == []
    assert _told("", url="http://127.0.0.1:9") == []
    assert _told("", url="nonsense") == []
    assert capfd.readouterr() == ("", "")


def _in_bash(environment: dict[str, str], *words: str) -> set[str]:
    """Return what bash offers for the last of the words."""
    script = (
        'eval "$(longhaul completion bash 2>/dev/null)"; '
        f"COMP_WORDS=({' '.join(words)!s}); COMP_CWORD={len(words) - 1}; "
        '_longhaul_completion longhaul; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash: apt-get install bash")
@pytest.mark.timeout(120)
def test_bash_completes_commands_options_and_ids(longhaul: dict[str, str], server: str) -> None:
    given = longhaul | {"LONGHAUL_API_URL": server, "LONGHAUL_API_KEY": "key-of-mine"}
    assert _in_bash(given, "longhaul", "st") == {"status"}
    assert {"run", "size", "quantize"} <= _in_bash(given, "longhaul", "''"), "those of plugins, too"
    assert "--metadata" in _in_bash(given, "longhaul", "submit", "--m")
    assert _in_bash(given, "longhaul", "status", "batch_01a") == {IDS[0]}
    assert _in_bash(given, "longhaul", "keys", "re") == {"revoke"}


@pytest.mark.parametrize(
    ("shell", "check"),
    [("zsh", ["zsh", "-f", "-c", "autoload -Uz compinit && compinit -u; {}; whence _longhaul_completion"]),
     ("fish", ["fish", "--no-config", "-c", "{}; complete -C 'longhaul statu'"])],
)  # fmt: skip
@pytest.mark.timeout(120)
def test_other_shells_take_their_line(longhaul: dict[str, str], shell: str, check: list[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    line = subprocess.run(
        ["longhaul", "completion", shell], env=longhaul, capture_output=True, text=True, check=True
    ).stdout.strip()
    command = [part.replace("{}", line) for part in check]
    done = subprocess.run(command, env=longhaul, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("_longhaul_completion" if shell == "zsh" else "status")
