"""A worker whose service is a twin that loads, works and drains as told: for the tests of Celery's part.

FAKE_LOAD and FAKE_DRAIN are seconds, FAKE_FAILS is a message, FAKE_EVENTS a file with a line for each call.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from jobs import errors
from jobs.settings import Settings
from worker.celery import app


class FakeService:
    """Has one busy thread like an engine, and writes down what is asked of it."""

    def __init__(self, settings: Settings) -> None:
        self.failed: str | None = None
        self.retired = False
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._steps = 0
        self._events = Path(os.environ["FAKE_EVENTS"])

    def start(self) -> None:
        time.sleep(float(os.environ.get("FAKE_LOAD", "0")))
        if "FAKE_FAILS" in os.environ:
            raise errors.ModelUnavailable(name="m", source="nowhere", reason=os.environ["FAKE_FAILS"])
        threading.Thread(target=self._work, daemon=True).start()
        self._note("started")

    @property
    def loading(self) -> bool:
        return not self._steps

    def begin_stop(self) -> None:
        self._note("begin_stop")
        self._stopping.set()

    def wait(self, timeout: float) -> bool:
        return self._stopped.wait(timeout)

    def ending(self) -> dict[str, int]:
        return {}

    def wake(self) -> None:
        self._note("wake")

    def run_unit(self, kind: str, job_id: str) -> None:
        self._note(f"{kind} {job_id}")

    def stats(self) -> dict[str, Any]:
        return {"state": "loading" if self.loading else "serving", "steps": self._steps}

    def _work(self) -> None:
        while not self._stopping.is_set():
            sum(range(200_000))
            self._steps += 1
        time.sleep(float(os.environ.get("FAKE_DRAIN", "0")))
        self._note("drained")
        self._stopped.set()

    def _note(self, event: str) -> None:
        with self._events.open("a") as events:
            events.write(event + "\n")


app.service_class = "tests.integration.fake_worker:FakeService"
