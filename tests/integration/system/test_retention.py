"""Retention with a real worker: what a running job needs stays, what a deleted one had goes."""

import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from jobs.sweep import DAY, HOUR, Sweep
from tests.integration.system.system import System, said

Start = Callable[..., System]
NAMES = [f"r{n}" for n in range(20)]


def sweep(one: System, scratch: Path, seconds: float) -> dict[str, int]:
    """Sweep everything so much later."""
    later = Sweep(one.store, scratch, everything=True, clock=lambda: time.time() + seconds)
    return dict(later.run().objects)


def stored(one: System) -> set[str]:
    return {found.key for found in one.store.list("")}


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_whose_input_expired_or_was_deleted_runs_on(system: Start, tmp_path: Path, begun: bool) -> None:
    one = system(faults=("slow:0.2",), max_running=4)
    data = b"".join(orjson.dumps(said(name, name)) + b"\n" for name in NAMES)
    expires = {"anchor": "created_at", "seconds": 3600}
    file = one.api.client.files.create(file=("in.jsonl", data), purpose="batch", expires_after=expires)  # type: ignore[arg-type]
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": file.id}
    job_id = one.api.http.post("/v1/batches", json=body).json()["id"]
    if begun:
        one.start_worker()
        one.wait_done(job_id, 4)
    # Its drafts and parts are those of a running job; only the file's time is over.
    assert sweep(one, tmp_path, 2 * HOUR) == {"expired files": 1, "markers": 1}
    assert one.api.http.get(f"/v1/files/{file.id}").status_code == 404
    if not begun:
        one.start_worker()
    one.finished(job_id)
    one.accounted(job_id, NAMES)
    assert f"files/{file.id}" in stored(one)
    assert sweep(one, tmp_path, 1.1 * DAY)["unrecorded uploads"] == 1
    assert f"files/{file.id}" not in stored(one)
    one.accounted(job_id, NAMES)
    assert one.api.http.get(f"/v1/batches/{job_id}/results").text.count("\n") == len(NAMES)


def test_a_job_that_ended_has_no_leftovers_and_a_deleted_one_leaves_its_input(
    system: Start, tmp_path: Path
) -> None:
    one = system()
    one.start_worker()
    job_id = one.submit(said(name, name) for name in NAMES)
    batch = one.finished(job_id)
    one.left_nothing()
    assert sweep(one, tmp_path, 1.1 * DAY) == {"markers": 1}
    one.accounted(job_id, NAMES)
    assert one.api.http.delete(f"/v1/batches/{job_id}").status_code == 200
    file = batch.input_file_id
    left = {f"files/{file}", f"file-records/default/{file}.json"}
    assert stored(one) == left | {f"deleted/{job_id}"}
    assert sweep(one, tmp_path, 1.1 * DAY) == {"markers": 1}
    assert stored(one) == left
