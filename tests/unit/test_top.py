"""Where `longhaul top` draws."""

import sys

import pytest

from jobs import top


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_a_stream_that_is_closed_is_no_terminal(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert top._on_terminal()
    monkeypatch.setattr(sys, name, None)
    assert not top._on_terminal()
