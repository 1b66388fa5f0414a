"""A job as large as one may be, through the whole system with an engine that echoes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.system.system import System, said

Start = Callable[..., System]
LINES = 50_000
WORKER_BYTES = 900_000_000


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_thousand_lines_are_done_in_flat_memory(system: Start) -> None:
    one = system(max_running=64, lease_seconds=30, heartbeat_seconds=5)
    worker = one.start_worker().wait_serving()
    names = [f"r{n}" for n in range(LINES)]
    job_id = one.submit(said(name, f"text {name} " + "word " * 90) for name in names)
    batch = one.finished(job_id, 600)
    assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
    one.accounted(job_id, names)
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) * 1024 < WORKER_BYTES
    one.left_nothing()
