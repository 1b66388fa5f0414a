"""A worker whose engine hangs ends itself, and one that is merely kept waiting does not."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.keeper import Keeper
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import System, said
from worker import watchdog

Start = Callable[..., System]


def test_a_hang_loses_nothing_that_is_finished_and_blames_nobody_who_waits(
    system: Start, tmp_path: Path
) -> None:
    trace = tmp_path / "computed"
    one = system(
        faults=("hang:mud", "slow:0.2", f"trace:{trace}"),
        max_running=4,
        step_timeout_seconds=2,
        flush_seconds=30,
    )
    hung = one.start_worker().wait_serving()
    texts = {f"r{n}": "zz mud" if n == 13 else f"text {n}" for n in range(24)}
    job_id = one.submit(said(name, text) for name, text in texts.items())
    assert hung.process.wait(60) == watchdog.EXIT_CODE
    computed = len(trace.read_text().split())
    assert computed >= 4
    assert one.done(job_id) == computed
    assert "longhaul: The engine has been in one step for" in hung.log
    (seen,) = hung.events("the engine hangs")
    assert any("_inject_faults" in line for line in seen["stacks"]["engine"])
    (last,) = hung.events("ending the process")
    assert len(last["running"]) == last["left_to_expire"] == 4
    with Keeper(one):
        batch = one.finished(job_id, 90)
    assert batch.request_counts.model_dump() == {"total": 24, "completed": 23, "failed": 1}
    one.accounted(job_id, list(texts))
    assert len(trace.read_text().split()) == 23
    attempts = {row["custom_id"]: row["attempts"] for row in one.metrics(job_id)}
    assert sorted(attempts.values(), reverse=True)[3:] == [0] * 20


def test_a_worker_that_is_stopped_for_long_does_not_end_itself(system: Start) -> None:
    one = system(faults=("slow:1",), max_running=4, step_timeout_seconds=3, lease_seconds=60)
    worker = one.start_worker().wait_serving()
    job_id = one.submit(said(f"r{n}", f"text {n}") for n in range(8))
    wait_until(lambda: worker.events("group claimed"), "claimed")
    worker.signal(signal.SIGSTOP)
    time.sleep(6)
    worker.signal(signal.SIGCONT)
    assert one.finished(job_id).request_counts.completed == 8
    assert worker.process.poll() is None
    assert not worker.events("the engine hangs")
