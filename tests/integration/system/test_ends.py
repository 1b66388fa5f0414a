"""How a job ends before its time: cancelled, expired."""

import signal
from collections.abc import Callable

from tests.integration.celery_worker import wait_until
from tests.integration.system.system import System, said

Start = Callable[..., System]


def names(count: int) -> list[str]:
    return [f"r{n}" for n in range(count)]


def test_cancelled_job_keeps_what_is_finished_and_says_so_of_the_rest(system: Start) -> None:
    one = system(faults=("slow:0.4",), max_running=2)
    one.start_worker()
    job_id = one.submit(said(name, f"text {name}") for name in names(20))
    one.wait_done(job_id, 5)
    assert one.api.client.batches.cancel(job_id).status == "cancelling"
    assert one.api.client.batches.cancel(job_id).status in {"cancelling", "cancelled"}
    batch = one.finished(job_id)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.failed) == ("cancelled", 20, 0)
    one.accounted(job_id, names(20))
    output, failed = one.lines(job_id)
    assert 5 <= len(output) == counts.completed < 20
    assert {each["error"]["code"] for each in failed} == {"batch_cancelled"}
    assert all(each["response"] is None for each in failed)
    one.left_nothing()


def test_job_cancelled_before_it_is_planned_has_a_line_for_each_request(system: Start) -> None:
    one = system()
    job_id = one.submit(said(name, f"text {name}") for name in names(7))
    assert one.api.client.batches.cancel(job_id).status == "cancelling"
    one.start_worker(LONGHAUL_MODEL="none")
    batch = one.finished(job_id)
    assert (batch.status, batch.request_counts.total) == ("cancelled", 7)
    one.accounted(job_id, names(7))
    assert batch.output_file_id is None
    one.left_nothing()


def test_expired_job_keeps_what_is_finished_and_says_so_of_the_rest(system: Start) -> None:
    one = system(faults=("slow:0.5",), max_running=2)
    one.start_worker()
    job_id = one.submit(said(name, f"text {name}") for name in names(30))
    one.wait_done(job_id, 4)
    # The shortest window is a minute: move the deadline instead of waiting for it.
    prefix = f"{{{one.settings.namespace}}}:"
    one.ledger.redis.hset(f"{prefix}job:{job_id}", "expires_at", "1")
    one.ledger.redis.zadd(f"{prefix}deadlines", {job_id: 1})
    batch = one.finished(job_id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    one.accounted(job_id, names(30))
    output, failed = one.lines(job_id)
    assert 4 <= len(output) == batch.request_counts.completed < 30
    assert {each["error"]["code"] for each in failed} == {"batch_expired"}
    assert batch.request_counts.failed == 0
    one.left_nothing()


def test_a_terminal_job_stays_readable_when_redis_has_forgotten_it(system: Start) -> None:
    one = system()
    one.start_worker()
    job_id = one.submit([said("a", "x")])
    before = one.finished(job_id)
    prefix = f"{{{one.settings.namespace}}}:"
    wait_until(lambda: one.ledger.redis.ttl(f"{prefix}job:{job_id}") > 0, "the job is about to be forgotten")
    one.ledger.redis.delete(f"{prefix}job:{job_id}")
    assert one.batch(job_id) == before
    assert job_id in [batch.id for batch in one.api.client.batches.list()]


def test_job_whose_input_is_deleted_before_it_is_validated_fails_and_says_so(system: Start) -> None:
    # The race: a file is deleted while a batch is made of it.
    one = system()
    job_id = one.submit([said("a", "x")])
    one.store.delete(f"files/{one.batch(job_id).input_file_id}")
    one.start_worker()
    batch = one.finished(job_id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data[0].code == "file_not_found"
    one.left_nothing()


def test_job_of_many_equal_requests_survives_a_drain(system: Start) -> None:
    # One request stands for thousands of rows: they are fed, completed and released as one.
    one = system(faults=("slow:1",))
    first = one.start_worker().wait_serving()
    job_id = one.submit(said(name, "same", temperature=0) for name in names(5000))
    wait_until(lambda: first.events("group claimed"), "claimed", 60)
    first.signal(signal.SIGTERM)
    assert first.process.wait(30) == 0
    one.start_worker()
    assert one.finished(job_id).request_counts.completed == 5000
    one.accounted(job_id, names(5000))
    one.left_nothing()
