"""`longhaul top` in a terminal: it draws, follows keys and sizes, waits for a server, and leaves cleanly."""

import fcntl
import http.server
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.unit.test_client import batch

ROOT = Path(__file__).parents[2]
_ENTER, _LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class Handler(http.server.BaseHTTPRequestHandler):
    """An API with 200 jobs."""

    status = 200
    delay = 0.0

    def do_GET(self) -> None:
        time.sleep(self.delay)
        body = json.dumps(self._answer()).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> Any:
        if self.status != 200:
            return {"error": {"message": "No such key.", "code": "x"}}
        parts = urlsplit(self.path)
        if parts.path == "/v1/queue":
            return {"models": [{"model": "m", "queued": 5, "leased": 1, "buckets": {"128": 5}}], "control": 0}
        if parts.path == "/v1/workers":
            return {"data": [], "api_version": "1"}
        asked = parse_qs(parts.query)
        first = int(asked.get("after", ["batch_-1"])[0].partition("_")[2]) + 1
        page = [batch(id=f"batch_{n:05}") for n in range(200)][first:][: int(asked["limit"][0])]
        return {
            "data": page,
            "has_more": bool(page) and page[-1]["id"] != "batch_00199",
            "last_id": page[-1]["id"],
        }

    def log_message(self, *_: Any) -> None: ...


class Api:
    """The server, which can be away."""

    def __init__(self) -> None:
        self.handler = type("Own", (Handler,), {})
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), self.handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Terminal:
    """A pseudo-terminal with `longhaul top` in it, as the leader of its own session."""

    def __init__(self, url: str, *options: str, lines: int = 24, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        self.size(lines)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        script = "from jobs.entry import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, "top", "--url", url, "--interval", "0.2", *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)} | variables,
        )
        self.seen = ""

    def size(self, lines: int, columns: int = 130) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, found: Callable[[str], bool], what: str, seconds: float = 20) -> None:
        """Read until what was drawn since the last call is as wanted."""
        deadline = time.monotonic() + seconds
        self.seen = ""
        while not found(self.seen):
            assert time.monotonic() < deadline, f"{what} never came: {self.seen[-2000:]!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")

    def shows(self, words: str) -> None:
        self.until(lambda seen: words in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen), words)

    def stopped(self) -> None:
        state = Path(f"/proc/{self.process.pid}/stat")
        self.until(lambda _: state.read_text().rpartition(")")[2].split()[0] == "T", "the stop")

    def ends(self) -> int:
        """Read what is left, and return the exit code; the terminal must be as it was."""
        self.until(lambda _: self.process.poll() is not None, "the end")
        while select.select([self._ours], [], [], 0.2)[0]:
            self.seen += os.read(self._ours, 65536).decode(errors="replace")
        after = termios.tcgetattr(self._theirs)
        assert after[:4] == self.before[:4], "the terminal is left as it was found"
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    yield made
    made.stop()


@pytest.fixture
def top(api: Api) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*options: str, **facts: Any) -> Terminal:
        opened.append(Terminal(api.url, *options, **facts))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_it_draws_scrolls_and_quits(top: Callable[..., Terminal]) -> None:
    terminal = top()
    terminal.shows("batch_00003")
    terminal.type(b"j")
    terminal.shows("jobs from 2")
    terminal.type(b"  ")
    terminal.shows("batch_00030")
    terminal.type(b"g")
    terminal.shows("batch_00000")
    terminal.type(b"q")
    assert terminal.ends() == 0
    assert _LEAVE in terminal.seen


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_terminal_that_can_be_used(
    top: Callable[..., Terminal], number: signal.Signals, code: int
) -> None:
    terminal = top()
    terminal.shows("batch_00003")
    terminal.process.send_signal(number)
    assert terminal.ends() == code
    assert _LEAVE in terminal.seen
    assert "Traceback" not in terminal.seen


def test_another_size_is_drawn_at_once(top: Callable[..., Terminal]) -> None:
    terminal = top(lines=12, LINES="24", COLUMNS="80")  # as some shells export them
    terminal.shows("batch_00002")
    terminal.size(40)
    terminal.shows("batch_00020")


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(top: Callable[..., Terminal]) -> None:
    terminal = top()
    terminal.shows("batch_00003")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.until(lambda seen: _LEAVE in seen, "the way out")
    terminal.stopped()
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until(lambda seen: _ENTER in seen and "batch_00003" in seen, "the way back")
    terminal.type(b"q")
    assert terminal.ends() == 0


def test_a_server_that_goes_away_is_waited_for(top: Callable[..., Terminal], api: Api) -> None:
    terminal = top()
    terminal.shows("batch_00003")
    api.stop()
    terminal.shows("No answer for 1s, since ")
    api.start()
    terminal.shows("q quit")
    terminal.type(b"q")
    assert terminal.ends() == 0


def test_a_server_that_hangs_is_told_while_it_does(top: Callable[..., Terminal], api: Api) -> None:
    terminal = top()
    terminal.shows("batch_00003")
    api.handler.delay = 30.0
    terminal.shows("it is slow, or hangs")
    terminal.type(b"q")
    assert terminal.ends() == 0


def test_a_wrong_key_ends_it_with_a_line(top: Callable[..., Terminal], api: Api) -> None:
    api.handler.status = 401
    terminal = top()
    assert terminal.ends() == 1
    assert "No such key. Set --api-key" in terminal.seen


def test_no_color_colours_nothing(top: Callable[..., Terminal]) -> None:
    terminal = top(NO_COLOR="1")
    terminal.shows("batch_00003")
    terminal.type(b"q")
    terminal.ends()
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;)[0-9;]*m", terminal.seen)


@pytest.mark.parametrize("options", [(), ("--json",), ("--once",)])
def test_where_the_output_is_no_terminal_it_prints_once_and_ends(api: Api, options: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from jobs.entry import main; main()", "top", "--url", api.url, *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "batch_00019" in done.stdout
    assert "batch_00020" not in done.stdout
    assert "\x1b" not in done.stdout
    if options == ("--json",):
        assert json.loads(done.stdout)["queue"]["models"][0]["queued"] == 5
