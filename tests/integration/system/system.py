"""What the tests of a whole system hold in their hands."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson

from jobs import schema
from jobs.settings import PREFIX, Settings
from tests.integration.api import serving
from tests.integration.celery_worker import wait_until

MODEL = serving.MODEL
TERMINAL = {"completed", "failed", "expired", "cancelled"}
line = serving.line


def said(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    """Return a request with one user message."""
    return line(custom_id, **{"messages": [{"role": "user", "content": text}]} | body)


class Worker:
    """One `celery -A worker worker` (or of another `app`) with its log."""

    def __init__(
        self,
        settings: Settings,
        log: Path,
        app: str = "worker",
        arguments: Sequence[str] = (),
        **changes: str,
    ) -> None:
        self._log = log
        clean = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "CELERY"))}
        command = [str(Path(sys.executable).with_name("celery")), "-A", app, "worker"]
        self._environment = clean | environment(settings) | changes
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--hostname", f"{log.stem}@%h", *arguments],
                env=self._environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of that name in the log."""
        found = [orjson.loads(text) for text in self.log.splitlines() if text.startswith("{")]
        return [event for event in found if event["event"] == name]

    def stats(self) -> dict[str, Any]:
        """Return what `celery inspect engine` tells of this worker."""
        command = [str(Path(sys.executable).with_name("celery")), "-A", "worker", "inspect", "engine"]
        options = ["--json", "--timeout", "5", "--destination", f"{self._log.stem}@{socket.gethostname()}"]
        done = subprocess.run([*command, *options], env=self._environment, capture_output=True, check=True)
        (answer,) = orjson.loads(done.stdout).values()
        found: dict[str, Any] = answer
        return found

    def wait_serving(self) -> "Worker":
        wait_until(lambda: self.events("serving"), f"serving: {self.log[-2000:]}", 60)
        return self

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()


class System:
    """An API in this process, and workers that are started when a test says so."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.settings = settings
        self.workers: list[Worker] = []
        self._directory = directory
        self._stack = ExitStack()
        self.api = self._stack.enter_context(serving.serve(settings))
        self.ledger, self.store = self.api.context.ledger, self.api.context.store

    def start_worker(
        self,
        settings: Settings | None = None,
        app: str = "worker",
        arguments: Sequence[str] = (),
        **changes: str,
    ) -> Worker:
        """Start a worker; `arguments` are options of its command, `changes` environment variables."""
        log = self._directory / f"worker{len(self.workers)}.log"
        self.workers.append(Worker(settings or self.settings, log, app, arguments, **changes))
        return self.workers[-1]

    def submit(self, requests: Iterable[dict[str, Any]], **fields: Any) -> str:
        """Upload these requests as a file and create a batch; return its id."""
        return self.submit_bytes(b"".join(orjson.dumps(one) + b"\n" for one in requests), **fields)

    def submit_bytes(self, data: bytes, **fields: Any) -> str:
        file = self.api.client.files.create(file=("in.jsonl", data), purpose="batch")
        body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": file.id}
        answer = self.api.http.post("/v1/batches", json=body | fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def batch(self, job_id: str) -> schema.Batch:
        """Return the batch; an object that is not exactly in the contract's shape fails."""
        answer = self.api.http.get(f"/v1/batches/{job_id}")
        assert answer.status_code == 200, answer.text
        return schema.Batch.model_validate_json(answer.text, strict=True)

    def done(self, job_id: str) -> int:
        counts = self.batch(job_id).request_counts
        return counts.completed + counts.failed

    def wait_done(self, job_id: str, count: int, seconds: float = 30) -> None:
        wait_until(lambda: self.done(job_id) >= count, f"{count} done of {self.batch(job_id)}", seconds)

    def finished(self, job_id: str, seconds: float = 60) -> schema.Batch:
        """Wait for a terminal state and return the batch; what the workers logged is shown when it hangs."""
        tail = "".join(worker.log[-1500:] for worker in self.workers)
        wait_until(lambda: self.batch(job_id).status in TERMINAL, f"{self.batch(job_id)}\n{tail}", seconds)
        return self.batch(job_id)

    def lines(self, job_id: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the (output, error) lines of a finished job."""
        batch = self.batch(job_id)
        return self._content(batch.output_file_id), self._content(batch.error_file_id)

    def metrics(self, job_id: str) -> list[dict[str, Any]]:
        manifest = orjson.loads(self.store.get(f"jobs/{job_id}/manifest.json"))
        text = self.store.get(manifest["files"]["metrics"]["key"])
        return [orjson.loads(one) for one in text.splitlines()]

    def accounted(self, job_id: str, expected: list[str]) -> None:
        """Fail unless each custom_id stands exactly once over output and errors, in input order in each."""
        output, failed = ([one["custom_id"] for one in found] for found in self.lines(job_id))
        assert sorted(output + failed) == sorted(expected)
        place = {name: index for index, name in enumerate(expected)}
        assert output == sorted(output, key=place.__getitem__)
        assert failed == sorted(failed, key=place.__getitem__)

    def left_nothing(self) -> None:
        """Fail when anything is left that would keep a worker alive."""
        depth = self.ledger.depth()
        assert depth.control == 0
        assert depth.fed_bytes == 0
        assert all(not one["queued"] and not one["leased"] for one in depth.models.values()), depth

    def stop(self) -> None:
        """Stop everything; doing it twice is fine."""
        for worker in self.workers:
            worker.stop()
        self._stack.close()

    def _content(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = self.api.client.files.content(file_id).content
        return [orjson.loads(one) for one in text.splitlines()]


def environment(settings: Settings) -> dict[str, str]:
    """Return the settings as the environment of a process."""
    values = settings.model_dump(mode="json", exclude_unset=True)
    plain = {
        name: value if isinstance(value, str) else orjson.dumps(value).decode()
        for name, value in values.items()
    }
    if settings.s3_secret_access_key:  # masked in a dump
        plain["s3_secret_access_key"] = settings.s3_secret_access_key.get_secret_value()
    return {PREFIX + name.upper(): value for name, value in plain.items()}
