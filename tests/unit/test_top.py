"""Where `longhaul top` draws."""

import sys
import threading
import time

import pytest

from jobs import client, top, top_data, top_terminal


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_a_stream_that_is_closed_is_no_terminal(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert top._on_terminal()
    monkeypatch.setattr(sys, name, None)
    assert not top._on_terminal()


class Away:
    """A reader whose server is away."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def read(self, most_jobs: int, after: str | None = None) -> top_data.Snapshot:
        self.asked.set()
        raise client.ServerUnreachable(url="http://x", reason="Connection refused")


def test_a_server_that_is_gone_is_told_with_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "localtime", time.gmtime)
    now, reader = [1000.0], Away()
    feed = top_terminal.Feed(reader, 60, "http://x", lambda: now[0])  # type: ignore[arg-type]
    assert reader.asked.wait(5)
    while feed.problem() is None:
        time.sleep(0.01)
    now[0] += 72
    assert feed.problem() == "No answer for 1m12s, since 00:16:40: Connection refused (http://x)"
