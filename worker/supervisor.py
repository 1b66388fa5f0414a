"""Starts the service, stops it once whoever asks and however often, and sees to it that the process ends."""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from jobs import errors

log = logging.getLogger(__name__)

# What the service may take beyond `drain_seconds` to hand its leases back, and Celery after that to close: it
# asks Redis several things on its way out, and each takes a socket timeout when Redis hangs.
RELEASE_SECONDS = 5
CLOSE_SECONDS = 3
# A service whose model is still loading holds no lease on a request.
LOADING_SECONDS = 1

_TICK_SECONDS = 0.5


class Service(Protocol):
    """What a worker runs."""

    failed: str | None
    retired: bool

    @property
    def loading(self) -> bool:
        """Whether the model is not loaded yet."""

    def start(self) -> None:
        """Begin to load the model and then to pull. Called in a thread, so it may take its time."""

    def begin_stop(self) -> None:
        """Stop claiming and begin to finish or release; returns at once, may be called while `start` runs."""

    def wait(self, timeout: float) -> bool:
        """Wait until no lease is held any more; tell whether that is so."""

    def ending(self) -> dict[str, int]:
        """Tell what became of the requests that were held when the stop began."""

    def wake(self) -> None:
        """Look for work now."""

    def run_unit(self, kind: str, job_id: str) -> None:
        """Run one unit of a job, if it is due and free."""

    def stats(self) -> dict[str, Any]:
        """Return counters as JSON values, without waiting for anything."""


class Supervisor:
    """The life of one service: `start`, then `begin_stop` any number of times, then `wait`.

    `end` is called (in a thread) with an exit code when the service failed for good or has retired and the
    worker must end, `wake` when a stop has begun; `busy` tells whether units run. `finish` ends a process
    that does not end by itself.
    """

    def __init__(
        self,
        service: Service,
        drain_seconds: float,
        end: Callable[[int], None],
        wake: Callable[[], None],
        busy: Callable[[], bool],
        finish: Callable[[int], None] = os._exit,
    ) -> None:
        self.service = service
        self.failure: str | None = None
        self.drained = False
        self._limit = drain_seconds + RELEASE_SECONDS
        self._end, self._wake, self._busy, self._finish = end, wake, busy, finish
        # Not an Event: a signal handler may interrupt put() and call it again, but not set().
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._started = threading.Event()
        self._stopped = threading.Event()
        self._loader = threading.Thread(target=self._load, name="service-start", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start the service in a thread, so that the worker answers while a model loads."""
        self._loader.start()
        self._watcher.start()

    @property
    def loading(self) -> bool:
        """Whether the service is still starting, or could not start."""
        return not self._started.is_set() or self.service.loading

    @property
    def exit_code(self) -> int:
        """What the process should end with: 0 when everything leased was finished or handed back."""
        return 0 if self.failure is None and self.drained else 1

    def begin_stop(self) -> None:
        """Ask for a stop. Does nothing else, so that a signal handler may call it."""
        self._orders.put(None)

    def wait(self) -> None:
        """Wait until the service has stopped or its time is over."""
        self._stopped.wait(self._limit + 1)

    def _load(self) -> None:
        try:
            self.service.start()
            self._started.set()
        except errors.LonghaulError as error:
            self._orders.put(errors.advised(error, "Check LONGHAUL_MODELS."))
        except Exception as error:
            log.exception("the service cannot start")
            self._orders.put(f"The service cannot start: {error!r}. The log says where.")

    def _watch(self) -> None:
        self.failure = self._next_order()
        begun = time.monotonic()
        if self.failure is not None:
            print(f"longhaul: {self.failure}", file=sys.stderr, flush=True)
            self._end(1)
        elif self.service.retired:
            self._end(0)
        log.info("stopping", extra={"loading": self.loading})
        self.service.begin_stop()
        self._wake()
        self.drained = self._drain(begun)
        seconds = round(time.monotonic() - begun, 2)
        log.info("stopped", extra={"drained": self.drained, **self.service.ending(), "seconds": seconds})
        self._stopped.set()
        while self._busy() and time.monotonic() < begun + self._limit:
            time.sleep(_TICK_SECONDS / 5)
        time.sleep(CLOSE_SECONDS)
        log.warning("ending the process: it did not close by itself", extra={"busy": self._busy()})
        self._finish(self.exit_code)

    def _next_order(self) -> str | None:
        while True:
            try:
                return self._orders.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                if self.service.failed is not None or self.service.retired:
                    return self.service.failed

    def _drain(self, begun: float) -> bool:
        while time.monotonic() < begun + self._limit:
            if self.service.wait(_TICK_SECONDS):
                return True
            if self.loading and time.monotonic() > begun + LOADING_SECONDS:
                return True
        return False
