"""`python -m api` as a process that can be killed, and clients that go on asking."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from jobs import ports
from jobs.settings import PREFIX, Settings
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import environment


class ApiProcess:
    """An API on a port of its own, found there again after it was killed."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self._settings, self._log = settings, log
        self.port = ports.take()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; returns at once."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "api", "--port", str(self.port)],
                env=clean | environment(self._settings),
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> "ApiProcess":
        def ready() -> bool:
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            try:
                return httpx.get(f"{self.url}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(ready, "the API is ready", 60)
        return self

    def end(self, number: signal.Signals) -> None:
        """End it; one that is told to must end well."""
        self.process.send_signal(number)
        code = self.process.wait(20)
        assert code == (0 if number is signal.SIGTERM else -number), self._log.read_text()[-2000:]


def create(urls: list[str], key: str, body: dict[str, Any], seconds: float = 60) -> dict[str, Any]:
    """Create a batch as a client that does not give up: again, at the next address, under the same key."""
    deadline = time.monotonic() + seconds
    for attempt in range(10_000):
        url = urls[attempt % len(urls)]
        try:
            answer = httpx.post(f"{url}/v1/batches", json=body, headers={"Idempotency-Key": key}, timeout=10)
        except httpx.TransportError:
            pass
        else:
            if answer.status_code == 200:
                made: dict[str, Any] = answer.json()
                return made
            assert answer.status_code == 503, answer.text
        assert time.monotonic() < deadline, f"{key}: not created within {seconds} s"
        time.sleep(0.05)
    raise AssertionError(key)
