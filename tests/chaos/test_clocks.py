"""Workers whose clocks are wrong by hours, or jump while they run: leases and epochs do not hang on them."""

from pathlib import Path

import pytest

from tests.chaos.scene import Set

APP = "tests.chaos.clock_worker"
HOUR = 3600.0


def set_clock(file: Path, hours: float) -> None:
    """Change it in one step, so that no worker reads half a number."""
    draft = file.with_suffix(".draft")
    draft.write_text(str(hours * HOUR))
    draft.replace(file)


def test_workers_whose_clocks_are_wrong_by_hours_and_jump(scene: Set, tmp_path: Path) -> None:
    one = scene()
    clocks = [tmp_path / "early", tmp_path / "late"]
    for clock, direction in zip(clocks, (-1, 1), strict=True):
        set_clock(clock, direction * one.random.uniform(1, 48))
    started = [one.one.start_worker(app=APP, CLOCK_FILE=str(clock)) for clock in clocks]
    for worker in started:
        worker.wait_serving()
    job_id = one.submit(100)
    one.run_a_while(job_id)
    one.watch.struck()
    for clock in clocks:
        set_clock(clock, one.random.uniform(-48, 48))
    made = one.settle("clocks of workers are wrong by hours, and jump")
    assert made.recomputed == 0
    assert one.one.batch(job_id).status == "completed"
    claimed = [worker.events("group claimed") for worker in started]
    assert all(claimed), "both took part"


@pytest.mark.long
def test_a_killed_worker_whose_clock_is_ahead_is_replaced_in_time(scene: Set, tmp_path: Path) -> None:
    # Were leases counted by the clocks of workers, its own would last for a day.
    one = scene()
    clock = tmp_path / "ahead"
    set_clock(clock, one.random.uniform(1, 48))
    victim = one.one.start_worker(app=APP, CLOCK_FILE=str(clock)).wait_serving()
    one.workers(1)
    one.run_a_while(one.submit())
    victim.kill()
    one.watch.struck()
    made = one.settle("a worker whose clock is hours ahead is killed (-9)")
    assert made.seconds < one.one.settings.lease_seconds + 10
