"""Sees that an engine has been in one step for longer than any honest step takes."""

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

log = logging.getLogger(__name__)
EXIT_CODE = 70
"""What a process ends with whose engine hung."""
_TICK_SECONDS = 1.0


class Watchdog:
    """Calls `on_hang(seconds)` once, in a thread of its own, when the engine gets nowhere for `seconds`.

    Only time that this process had counts: not while it was stopped or the machine slept. After a gap between
    two looks that is what the processor time says, so that a library which holds Python's lock for long, at
    work, counts and a SIGSTOP does not. `seconds` 0 never calls.
    """

    def __init__(
        self,
        seconds: float,
        on_hang: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._limit, self._on_hang = seconds, on_hang
        self._clock, self._processor = clock, processor
        self._tick_seconds = min(_TICK_SECONDS, seconds / 10)
        self._looked, self._used = clock(), processor()
        self._inside = False
        self._sign: Hashable = None
        self._spent = 0.0
        self._closing = Event()

    def start(self) -> None:
        """Begin to look, unless it is off."""
        if self._limit:
            Thread(target=self._run, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()

    @contextmanager
    def watching(self, sign: Hashable = None) -> Iterator[None]:
        """Count the time inside. It adds up over calls whose `sign` is the same and not None."""
        if sign is None or sign != self._sign:
            self._spent = 0.0
        self._sign = sign
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time inside: it waits for somebody else, and honestly so."""
        was, self._inside = self._inside, False
        try:
            yield
        finally:
            self._spent = 0.0
            self._inside = was

    def look(self) -> bool:
        """Count what has passed since the last look; tell whether that is too long."""
        now, used = self._clock(), self._processor()
        most = max(2 * self._tick_seconds, used - self._used)
        passed = min(now - self._looked, most)
        self._looked, self._used = now, used
        if self._inside:
            self._spent += passed
        return self._inside and self._spent > self._limit

    def _run(self) -> None:
        while not self._closing.wait(self._tick_seconds):
            if self.look():
                self._on_hang(self._spent)
                return
