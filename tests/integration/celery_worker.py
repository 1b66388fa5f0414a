"""Starts `celery -A ... worker` as a user would: no flags, settings in the environment."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import model_settings, queue, settings

MODELS = {"m/x.y": {"source": "nowhere", "engine": "echo"}}
FAKE = "tests.integration.fake_worker"


def environment(redis_url: str, directory: Path, **changes: str) -> dict[str, str]:
    """Return what a worker with a local store needs; `changes` may replace any of it."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("LONGHAUL_", "CELERY"))
    }
    return clean | {
        "LONGHAUL_REDIS_URL": redis_url,
        "LONGHAUL_STORE_URL": f"file://{directory / 'store'}",
        "LONGHAUL_MODELS": json.dumps(MODELS),
        "FAKE_EVENTS": str(directory / "events"),
        **changes,
    }


def celery(*arguments: str, app: str = FAKE) -> list[str]:
    """Return a command line of Celery for an application of ours."""
    return [str(Path(sys.executable).with_name("celery")), "-A", app, *arguments]


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20) -> None:
    """Fail when `condition` does not hold within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


class Worker:
    """A running worker with its log and the calls its fake service saw."""

    def __init__(self, redis_url: str, directory: Path, app: str = FAKE, **changes: str) -> None:
        self.environment = environment(redis_url, directory, **changes)
        self.settings = settings.Settings(
            redis_url=redis_url, models={k: model_settings.ModelSettings(**v) for k, v in MODELS.items()}
        )
        self._events = directory / "events"
        self._log = directory / f"worker-{time.monotonic_ns()}.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                celery("worker", app=app),
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def name(self) -> str:
        """The name it has for remote control."""
        return f"celery-{self.process.pid}@{socket.gethostname()}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def plain_lines(self) -> list[str]:
        """What the worker printed that is not an event."""
        return [line for line in self.log.splitlines() if not line.startswith("{")]

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def events(self) -> list[str]:
        return self._events.read_text().splitlines() if self._events.exists() else []

    def wait_ready(self) -> "Worker":
        wait_until(lambda: '"event": "ready"' in self.log, "ready")
        return self

    def wait_event(self, event: str, seconds: float = 20) -> None:
        wait_until(lambda: event in self.events, f"{event!r} in {self.events}", seconds)

    def inspect(self, command: str) -> Any:
        """Return what this worker answers to `celery inspect COMMAND`."""
        done = subprocess.run(
            celery("inspect", command, "--json", "--timeout", "5", "--destination", self.name),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (answer,) = json.loads(done.stdout).values()
        return answer

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def send(self, task: str, *args: Any) -> None:
        producer = queue.Producer(self.settings)
        assert producer.send(task, *args)
        producer.close()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
