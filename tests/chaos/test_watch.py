"""A kill in the middle, counted: what each round of every fault is measured with."""

from collections.abc import Callable
from pathlib import Path

from tests.chaos.rounds import Watch
from tests.integration.system.system import System, said

Start = Callable[..., System]


def test_a_killed_worker_costs_only_what_it_was_computing(system: Start, tmp_path: Path) -> None:
    trace = tmp_path / "computed"
    one = system(faults=("slow:0.3", f"trace:{trace}"), max_running=4)
    watch = Watch(one, trace)
    first = one.start_worker().wait_serving()
    one.start_worker().wait_serving()
    names = [f"r{n}" for n in range(60)]
    job_id = one.submit(said(name, f"text {name}") for name in names)
    one.wait_done(job_id, 8)
    first.kill()
    watch.struck()
    made = watch.settle("a worker is killed", {job_id: names})
    assert (made.lost, made.doubled) == (0, 0)
    assert made.recomputed <= 8
