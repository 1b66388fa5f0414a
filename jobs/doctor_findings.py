"""What a check found, and how checks are run so that none of them hangs."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jobs import errors, masking

State = Literal["ok", "warning", "wrong", "unchecked"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what is so, and what to do about it unless it is fine."""

    area: str
    name: str
    state: State
    said: str
    advice: str = ""

    def json(self) -> dict[str, str]:
        """Return it as JSON values, secrets masked."""
        return {name: _shown(str(value)) for name, value in asdict(self).items()}


def _shown(text: str) -> str:
    # A variable or a path may hold bytes that are no UTF-8.
    return masking.masked(text).encode(errors="replace").decode()


@dataclass(frozen=True)
class Look:
    """Makes findings about one area: `looked.ok("version", "7.2")`."""

    area: str

    def ok(self, name: str, said: str) -> Finding:
        return Finding(self.area, name, "ok", said)

    def warning(self, name: str, said: str, advice: str) -> Finding:
        return Finding(self.area, name, "warning", said, advice)

    def wrong(self, name: str, said: str, advice: str) -> Finding:
        return Finding(self.area, name, "wrong", said, advice)

    def unchecked(self, name: str, said: str, advice: str = "") -> Finding:
        return Finding(self.area, name, "unchecked", said, advice)


@dataclass(frozen=True)
class Area:
    """Checks that follow each other, in a thread of their own, for at most so many seconds."""

    name: str
    check: Callable[[], Iterable[Finding]]
    seconds: float


_END = object()


def run(areas: Iterable[Area]) -> Iterator[Finding]:
    """Yield what all areas find, in their order; they run side by side, and what hangs is left behind."""
    began = time.monotonic()
    started = [(area, _start(area)) for area in areas]
    for area, found in started:
        yield from _until(area, found, began + area.seconds)


def _start(area: Area) -> "queue.SimpleQueue[Any]":
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def look() -> None:
        try:
            for finding in area.check():
                found.put(finding)
        except errors.LonghaulError as error:
            found.put(Finding(area.name, "check", "wrong", str(error), "See the message."))
        except Exception as error:  # whatever a library raises, the other checks are still of use
            said = f"{type(error).__name__}: {error}".split("\n")[0]
            found.put(Finding(area.name, "check", "unchecked", said, "The check itself failed."))
        found.put(_END)

    threading.Thread(target=look, name=f"doctor-{area.name}", daemon=True).start()
    return found


def _until(area: Area, found: "queue.SimpleQueue[Any]", deadline: float) -> Iterator[Finding]:
    while True:
        try:
            finding = found.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            said = f"no answer within {area.seconds:g} s; what comes after it was not looked at"
            yield Finding(area.name, "time", "wrong", said, "Look at its log, and at the network between.")
            return
        if finding is _END:
            return
        yield finding
