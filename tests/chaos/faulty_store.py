"""A system whose store fails: each process reaches a real SeaweedFS through one faulty proxy."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson

from jobs import ids
from jobs.embedded import SeaweedServer
from tests.chaos.rounds import Round, Watch
from tests.faulty_http import Proxy
from tests.integration.system.system import TERMINAL, System, said

ANSWER_SECONDS = 25
"""The longest the API may take to say that the store does not answer."""


class Patient:
    """A client of the API that tries again whatever answers 503, and fails for every other error."""

    def __init__(self, one: System) -> None:
        self._http = httpx.Client(base_url=one.api.url, timeout=ANSWER_SECONDS + 5)
        self.refused = 0
        self.slowest = 0.0

    def close(self) -> None:
        self._http.close()

    def __call__(self, method: str, path: str, seconds: float = 90, **options: Any) -> httpx.Response:
        """Return the answer 200 that comes at last."""
        deadline = time.monotonic() + seconds
        while True:
            assert time.monotonic() < deadline, f"{method} {path}: not within {seconds} s"
            try:
                answer = self._ask(method, path, **options)
            except httpx.RemoteProtocolError:  # the store broke off in the middle of a download
                continue
            if answer.status_code == 200:
                return answer
            assert answer.status_code == 503, answer.text
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("server_error", "unavailable")
            self.refused += 1
            time.sleep(0.2)

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        began = time.monotonic()
        answer = self._http.request(method, path, **options)
        self.slowest = max(self.slowest, time.monotonic() - began)
        assert self.slowest < ANSWER_SECONDS
        return answer

    def submit(self, requests: list[dict[str, Any]], padding: int = 0) -> str:
        """Upload these requests, with so many blanks behind them, and create a batch; return its id."""
        data = b"".join(orjson.dumps(one) + b"\n" for one in requests) + b" " * padding
        form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
        file = self("POST", "/v1/files", **form).json()
        assert file["bytes"] == len(data)
        body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": file["id"]}
        key = {"Idempotency-Key": ids.ulid()}
        return str(self("POST", "/v1/batches", json=body, headers=key).json()["id"])

    def assert_whole(self, batch: dict[str, Any]) -> None:
        """Fail unless every file of a job that has ended can be read, and is as long as all say it is."""
        counts, lines = batch["request_counts"], {}
        for kind in ("output", "error"):
            data, file_id = b"", batch[f"{kind}_file_id"]
            if file_id is not None:
                data = self("GET", f"/v1/files/{file_id}/content").content
                assert len(data) == self("GET", f"/v1/files/{file_id}").json()["bytes"]
            lines[kind] = [orjson.loads(line) for line in data.splitlines()]
        assert len(lines["output"]) == counts["completed"]
        if batch["status"] == "completed":
            assert len(lines["output"]) + len(lines["error"]) == counts["total"]


class FaultyStore:
    """Runs jobs through faults: what a round is made of."""

    def __init__(self, one: System, proxy: Proxy, trace: Path) -> None:
        self.one, self.proxy = one, proxy
        self.watch, self.ask = Watch(one, trace), Patient(one)

    def close(self) -> None:
        """End all faults, and the system."""
        self.proxy.faults.clear()
        self.proxy.storm = None
        self.ask.close()
        self.one.stop()

    def run(
        self,
        fault: str,
        begin: Callable[[], None],
        end: Callable[[], None] | None = None,
        rows: int = 24,
        padding: int = 0,
    ) -> Round:
        """Let faults `begin`, run a job, let them `end` (None: they last until it has ended), and count."""
        names = [f"r{n}" for n in range(rows)]
        self.watch.struck()
        begin()
        job_id = self.ask.submit([said(name, f"text {name}") for name in names], padding)
        with self._watched(job_id) as ended:
            if end is not None:
                end()
            assert ended.wait(120), self.one.workers[-1].log[-3000:]
        self.proxy.faults.clear()
        self.proxy.storm = None
        made = self.watch.settle(fault, {job_id: names})
        assert (made.lost, made.doubled, made.recomputed) == (0, 0, 0)
        return made

    @contextmanager
    def _watched(self, job_id: str) -> Iterator[threading.Event]:
        """Look at the job all the while; at the first look that says it has ended, read all its files."""
        ended, leaving = threading.Event(), threading.Event()
        found: list[BaseException] = []

        def look() -> None:
            try:
                while not leaving.wait(0.05):
                    batch = self.ask("GET", f"/v1/batches/{job_id}").json()
                    if batch["status"] in TERMINAL:
                        self.ask.assert_whole(batch)
                        return
            except BaseException as error:
                found.append(error)
            finally:
                ended.set()

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield ended
        finally:
            leaving.set()
            thread.join()
        if found:
            raise found[0]


def settings(seaweedfs: SeaweedServer, bucket: str | None = None) -> dict[str, Any]:
    """Return the settings of a system whose store is a part of a bucket of its own."""
    return {
        "store_url": f"s3://{bucket or seaweedfs.bucket}/{ids.ulid().lower()}",
        "s3_access_key_id": seaweedfs.access_key,
        "s3_secret_access_key": seaweedfs.secret_key,
    }
