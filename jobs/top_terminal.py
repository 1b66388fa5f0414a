"""The live side of `longhaul top`: a thread that asks, a terminal that draws, and the keys."""

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import console, live, text

from jobs import client, errors, progress, terminal, top_data, top_view, values

_TICK_SECONDS = 0.1
_REST = 4.0
"""So many times as long as an answer took the next question waits ..."""
_MOST_REST = 10.0
"""... but no longer than this (seconds)."""
_LATE_SECONDS = 4.0
_KEYS = {
    b"q": "quit",
    b"Q": "quit",
    b"j": "down",
    b"k": "up",
    b"\t": "next",
    b" ": "page",
    b"b": "back",
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[6~": "page",
    b"\x1b[5~": "back",
    b"g": "top",
    b"\x1b[H": "top",
    b"\x1bOH": "top",
}


class Feed:
    """Asks the server every `interval` seconds, in a thread, so that one that hangs stops no key.

    `failed` is what trying again would not change.
    """

    def __init__(
        self, reader: top_data.Reader, interval: float, url: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.snapshot: top_data.Snapshot | None = None
        self.failed: errors.LonghaulError | None = None
        self._reader, self._interval, self._url, self._clock = reader, interval, url, clock
        self._answered = clock()
        self._asked_at: float | None = None
        self._reason: str | None = None
        self._wanted: tuple[int, str | None] = (50, None)
        self._asked = threading.Event()
        threading.Thread(target=self._run, name="top", daemon=True).start()

    def want(self, most_jobs: int, after: str | None) -> None:
        """Say which jobs are to be asked for; others than before are asked for at once."""
        if (most_jobs, after) != self._wanted:
            self._wanted = (most_jobs, after)
            self._asked.set()

    def problem(self) -> str | None:
        """Return for how long there has been no answer, and why; None while answers come."""
        now, asked_at = self._clock(), self._asked_at
        late = asked_at is not None and now - asked_at >= _LATE_SECONDS
        if self._reason is None and not late:
            return None
        since = time.strftime("%H:%M:%S", time.localtime(self._answered))
        told = f"No answer for {progress.span(max(0.0, now - self._answered))}, since {since}"
        return f"{told}: {self._reason or 'it is slow, or hangs'} ({self._url})"

    def _run(self) -> None:
        while self.failed is None:
            began, self._asked_at = time.monotonic(), self._clock()
            try:
                self.snapshot = self._reader.read(*self._wanted)
                self._answered, self._reason = self._clock(), None
            except client.ServerUnreachable as error:
                self._reason = error.values["reason"]
            except errors.LonghaulError as error:
                self.failed = error
            self._asked_at = None
            # A server that has much to look through is asked less often.
            self._asked.wait(max(self._interval, min(_MOST_REST, _REST * (time.monotonic() - began))))
            self._asked.clear()


def show(feed: Feed, url: str) -> None:
    """Draw until somebody presses q; raise what the feed ran into."""
    # LINES and COLUMNS, where a shell exports them, stay what they were when the terminal gets another size.
    environment = {name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")}
    screen = terminal.printer(_environ=environment)
    view, drawn = top_view.View(), None
    with _keys() as read, _ended_by_signals(), _Drawn(screen) as shown:
        while feed.failed is None:
            size, snapshot = screen.size, feed.snapshot
            feed.want(max(1, size.height), view.after)
            problem = feed.problem()
            now = (size, snapshot, view, problem, shown.times)
            if now != drawn:
                drawn = now
                shown.draw(_picture(snapshot, view, url, problem, size))
            for key in read():
                if key == "quit":
                    return
                view = turned(view, key, snapshot, (size.width, size.height))
            shown.rest()
    raise feed.failed


def turned(
    view: top_view.View, key: str, snapshot: top_data.Snapshot | None, size: tuple[int, int]
) -> top_view.View:
    """Return the view after a key, on a terminal of `size` (columns, lines)."""
    if key == "next":
        return top_view.focused(view)
    if snapshot is None:
        return view
    page = getattr(top_view.heights(snapshot, size), view.focus)
    by = {"up": -1, "down": 1, "page": page, "back": -page, "top": -(10**9)}[key]
    return top_view.scrolled(view, by, snapshot, size)


def _picture(
    snapshot: top_data.Snapshot | None,
    view: top_view.View,
    url: str,
    problem: str | None,
    size: console.ConsoleDimensions,
) -> Any:
    if snapshot is None:
        return text.Text(values.printable(problem or f"Asking {url} ..."))
    return top_view.screen(snapshot, view, url, problem, (size.width, size.height))


class _Drawn:
    """The screen that is ours meanwhile; Ctrl-Z gives it back until the process goes on."""

    def __init__(self, screen: console.Console) -> None:
        self._live = live.Live(console=screen, screen=True, auto_refresh=False)
        self._stopping = False
        self.times = 0

    def __enter__(self) -> "_Drawn":
        self._before = signal.signal(signal.SIGTSTP, self._stop)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        signal.signal(signal.SIGTSTP, self._before)

    def draw(self, picture: Any) -> None:
        self._live.update(picture, refresh=True)

    def rest(self) -> None:
        """Stop the process, if that was asked for."""
        if self._stopping:
            self._stopping = False
            self._live.stop()
            with _cooked():
                os.kill(os.getpid(), signal.SIGSTOP)
            self.times += 1
            self._live.start()

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True


@contextmanager
def _keys() -> Iterator[Callable[[], list[str]]]:
    """Have keys come as they are pressed; yield what waits a moment for them. Ctrl-C stays Ctrl-C."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read() -> list[str]:
        if not select.select([fd], [], [], _TICK_SECONDS)[0]:
            return []
        return parsed(os.read(fd, 1024) or b"q")  # nobody is there any more

    tty.setcbreak(fd)
    try:
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _cooked() -> Iterator[None]:
    """Give the terminal back as a shell wants it."""
    fd = sys.stdin.fileno()
    ours = termios.tcgetattr(fd)
    theirs = termios.tcgetattr(fd)
    theirs[3] |= termios.ICANON | termios.ECHO
    termios.tcsetattr(fd, termios.TCSADRAIN, theirs)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, ours)


def parsed(typed: bytes) -> list[str]:
    """Return the keys that these bytes are; others mean nothing."""
    found = []
    while typed:
        known = next((key for key in _KEYS if typed.startswith(key)), None)
        if known:
            found.append(_KEYS[known])
        typed = typed[len(known or b"?") :]
    return found


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Leave the terminal as it was when the process is told to end."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
