"""A worker that ends by itself: idle for long enough, or told to, and never with work in hand."""

import socket

import pytest

from jobs.ledger_fleet import Present
from tests.integration.celery_worker import wait_until
from tests.integration.system.conftest import Start
from tests.integration.system.system import MODEL, System, said


def present(one: System) -> list[Present]:
    return one.ledger.fleet.present()


def test_a_worker_ends_when_idle_and_not_before_its_work_is_done(system: Start) -> None:
    one = system(faults=("slow:1.5",), exit_when_idle_seconds=1.0, max_running=2)
    job_id = one.submit(said(str(n), "text") for n in range(4))
    worker = one.start_worker().wait_serving()
    assert worker.process.wait(40) == 0, worker.log[-2000:]
    assert one.batch(job_id).status == "completed"
    (event,) = worker.events("retiring")
    assert event["reason"] == "idle for 1 s"
    assert present(one) == []


def test_the_option_of_the_command_line_is_the_setting(system: Start) -> None:
    one = system()
    worker = one.start_worker(arguments=("--exit-when-idle", "0.5"))
    assert worker.process.wait(40) == 0, worker.log[-2000:]


def test_a_worker_reports_and_retires_when_told_to_with_what_it_runs(system: Start) -> None:
    one = system(faults=("slow:2",), max_running=2, heartbeat_seconds=0.3)
    job_id = one.submit(said(str(n), "text") for n in range(6))
    worker = one.start_worker().wait_serving()
    wait_until(lambda: [each.held for each in present(one)] == [2], "claimed", 30)
    (found,) = present(one)
    assert (found.host, found.pid, found.capacity) == (socket.gethostname(), worker.process.pid, 2)
    one.ledger.fleet.retire([found.name])
    assert worker.process.wait(40) == 0, worker.log[-2000:]
    done = one.done(job_id)
    assert 0 < done < 6, "it finished what it ran and claimed no more"
    assert one.ledger.depth().models[one.settings.fingerprints[MODEL]]["leased"] == 0
    one.start_worker()
    batch = one.finished(job_id)
    assert batch.request_counts.completed == 6
    assert {each["attempts"] for each in one.metrics(job_id)} == {0}, "a retreat is no death"


@pytest.mark.timeout(60)
def test_a_worker_for_control_alone_ends_when_idle(system: Start) -> None:
    one = system(model="none", exit_when_idle_seconds=0.5)
    worker = one.start_worker()
    assert worker.process.wait(40) == 0, worker.log[-2000:]
