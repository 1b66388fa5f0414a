"""Workers that are killed, told to stop, or stopped and continued, at a random moment of their work."""

import signal
import time

import pytest

from jobs import ids
from tests.chaos import scene as scenes
from tests.chaos.scene import Set
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import Worker

ENDS = {signal.SIGKILL: "killed (-9)", signal.SIGTERM: "told to stop (SIGTERM)"}


def end(worker: Worker, number: signal.Signals, drain_seconds: float) -> None:
    """End a worker; one that is told to must end well."""
    worker.signal(number)
    code = worker.process.wait(drain_seconds + 10)
    assert code == (0 if number is signal.SIGTERM else -number), worker.log[-2000:]


@pytest.mark.parametrize("number", scenes.tiers([(each,) for each in ENDS], {(signal.SIGKILL,)}))
def test_one_of_two_workers_ends(scene: Set, number: signal.Signals) -> None:
    one = scene()
    workers = one.workers()
    one.run_a_while(one.submit())
    victim = one.random.choice(workers)
    if number is signal.SIGTERM:
        one.watch.struck(lives_on=True)
    end(victim, number, one.one.settings.drain_seconds)
    if number is signal.SIGKILL:
        one.watch.struck()
    made = one.settle(f"one worker of two is {ENDS[number]}")
    assert made.recomputed <= (8 if number is signal.SIGKILL else 0)


@pytest.mark.parametrize("number", scenes.tiers([(each,) for each in ENDS], {(signal.SIGTERM,)}))
def test_all_workers_end(scene: Set, number: signal.Signals) -> None:
    one = scene()
    workers = one.workers()
    one.run_a_while(one.submit())
    for worker in workers:
        worker.signal(number)
    for worker in workers:
        worker.process.wait(one.one.settings.drain_seconds + 10)
    one.watch.struck()
    one.one.start_worker().wait_serving()
    one.watch.over()
    made = one.settle(f"all workers are {ENDS[number]}, another is started")
    assert made.recomputed <= (16 if number is signal.SIGKILL else 0)


def test_a_worker_stopped_for_longer_than_its_lease_writes_nothing_that_counts(scene: Set) -> None:
    one = scene()
    (zombie,) = one.workers(1)
    job_id = one.submit(100)
    one.run_a_while(job_id)
    zombie.signal(signal.SIGSTOP)
    scenes.wait_stopped(zombie)
    one.watch.struck(lives_on=True)
    held = {int(name.rpartition(":")[2]) for name in one.watch.leased()}
    one.one.start_worker().wait_serving()
    one.watch.over()
    wait_until(lambda: one.watch.done(ids.request_id(job_id, row) for row in held), "taken over", 30)
    zombie.signal(signal.SIGCONT)
    one.settle("a worker is stopped for longer than its lease, then continued")
    counted = scenes.workers_of(one.one, job_id)
    assert not [row for row in held if f"-{zombie.process.pid}-" in counted[row]]
    wait_until(lambda: noticed(zombie), "the zombie noticed that its leases are gone")


@pytest.mark.long
def test_a_worker_stopped_for_about_its_lease_goes_on(scene: Set) -> None:
    one = scene()
    workers = one.workers()
    one.run_a_while(one.submit())
    victim = one.random.choice(workers)
    victim.signal(signal.SIGSTOP)
    scenes.wait_stopped(victim)
    one.watch.struck(lives_on=True)
    time.sleep(one.one.settings.lease_seconds * one.random.uniform(0.3, 1.3))
    victim.signal(signal.SIGCONT)
    one.settle("a worker is stopped for about its lease, then continued")


def noticed(zombie: Worker) -> bool:
    return bool(
        zombie.events("rows refused: their leases were lost")
        or zombie.events("requests dropped: their leases were lost")
    )
