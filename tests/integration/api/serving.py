"""The API in a thread, the clients that talk to it, and a hand that does a worker's part of a job."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import orjson
import uvicorn
from fastapi import FastAPI

from api import protocol
from api.app import create_app
from api.context import Context
from jobs import answers, errors, finalize, results
from jobs.ledger import Finished, Unit
from jobs.records import NO_USAGE, JobRecord, Manifest, PlannedRequest, ResultRow
from jobs.settings import Settings

MODEL = "m"


@dataclass
class Api:
    """A running API: plain HTTP, the `openai` client, and what lies behind it."""

    url: str
    http: httpx.Client
    client: openai.OpenAI
    context: Context
    app: FastAPI

    def upload(self, *ids: str, purpose: str = "batch") -> str:
        """Upload a file with these requests; return its id."""
        data = b"".join(orjson.dumps(line(name)) + b"\n" for name in ids)
        return str(self.client.files.create(file=("in.jsonl", data), purpose=purpose).id)  # type: ignore[arg-type]

    def create(self, *ids: str, **fields: Any) -> str:
        """Create a batch of these requests; return its id."""
        body = {
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "input_file_id": self.upload(*ids),
        }
        answer = self.http.post("/v1/batches", json=body | fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])


@contextlib.contextmanager
def serve(settings: Settings) -> Iterator[Api]:
    """Run the API of these settings on a free port."""
    app = create_app(settings)
    options = protocol.options(settings.upload_idle_seconds)
    # With the protocol named, asyncio sets TCP_NODELAY: without it every answer waits for a delayed ACK.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=2, **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{port}"
        try:
            with (
                httpx.Client(base_url=url, timeout=30) as http,
                openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
            ):
                until(lambda: server.started)
                yield Api(url, http, client, app.state.context, app)
        finally:
            server.should_exit = True
            thread.join(10)


def until(check: Any, seconds: float = 10) -> None:
    """Wait until `check()` is true."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    """Return one request."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | body,
    }


class Hand:
    """Plays the worker for one job, step by step, with the same calls."""

    def __init__(self, context: Context, job_id: str, total: int) -> None:
        self.context, self.job_id, self.total = context, job_id, total
        self.record = JobRecord.from_json(context.store.get(f"jobs/{job_id}/job.json"))
        self.unit: Unit | None = None

    def begin(self) -> None:
        """Begin the plan."""
        self.unit = self._claim("plan")
        fingerprint = self.context.settings.fingerprints[MODEL]
        self.context.ledger.begin_plan(self.unit, self.total, MODEL, fingerprint)

    def part(self, *rows: tuple[int, str, bool]) -> str:
        """Write a part with (row, custom_id, failed) and register it; return its name."""
        part = results.Part(self.job_id)
        part.add(self._row(*row) for row in rows)
        part.write(self.context.store)
        finished = [
            Finished(f"{self.job_id}:{row.row}", None, row.row, row.failed, *row.usage) for row in part.rows
        ]
        self.context.ledger.complete(None, self.job_id, part.name, finished)
        return part.name

    def end(self) -> None:
        """End the plan: with nothing left to run, the job goes to finalizing."""
        assert self.unit is not None
        self.context.ledger.end_plan(self.unit)

    def finish(self) -> None:
        """Finalize."""
        unit = self._claim("finalize")
        job = self.context.ledger.job(self.job_id)
        assert job is not None
        state = job.outcome or "completed"
        where = f"jobs/{self.job_id}/out/{unit.epoch}/"
        merge = finalize.Merge(self.record, state, self.context.store, self.context.settings, where)
        times = job.times | {f"{state}_at": max(time.time(), *job.times.values())}
        manifest = merge.run(self.context.ledger.parts(self.job_id), job.total, job.model, times)
        manifest = finalize.publish(self.context.store, self.record, manifest)
        self.context.ledger.finish(unit, manifest)
        finalize.close(self.context.store, self.job_id)

    def fail(self, code: str, line_number: int) -> None:
        """Fail the job for an error in its lines."""
        unit = self._claim("plan")
        now = time.time()
        manifest = Manifest(
            job_id=self.job_id,
            state="failed",
            model=None,
            times={"created_at": self.record.created_at, "failed_at": now},
            total=0,
            completed=0,
            failed=0,
            usage=NO_USAGE,
            files={},
            errors=[{"code": code, "message": "No.", "param": None, "line": line_number}],
        )
        self.context.ledger.fail(unit, finalize.publish(self.context.store, self.record, manifest))
        finalize.close(self.context.store, self.job_id)

    def _claim(self, kind: str) -> Unit:
        # A recovery that runs at the moment holds a unit for an instant.
        claimed: list[Unit] = []

        def claim() -> bool:
            unit = self.context.ledger.claim_unit(kind, self.job_id)
            claimed.extend([unit] if unit else [])
            return bool(claimed)

        until(claim)
        return claimed[0]

    def _row(self, row: int, custom_id: str, failed: bool) -> ResultRow:
        if failed:
            error = errors.ParameterRefused("No.", param="max_tokens")
            return results.refused(self.job_id, row, custom_id, error)
        now = self.record.created_at
        request = PlannedRequest(
            id=f"{self.job_id}:{row}",
            job_id=self.job_id,
            row=row,
            custom_id=custom_id,
            endpoint=self.record.endpoint,
            model=MODEL,
            bucket=128,
            created_at=now,
            prompt_ids=[1, 2, 3, 4, 5],
            params={},
        )
        outcome = answers.Outcome((answers.Choice("text", "length", 4),), 2, now + 1, now + 2, 0.5, 0.1)
        return results.rows_of(request, outcome, "m@0", 1, "hand")[0]
