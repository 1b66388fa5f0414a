"""Who comes first: a job of many requests, one of few, one of another tenant."""

import io
import time
from collections.abc import Callable

import orjson
import pytest

from jobs.creation import NewBatch
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import System, said

Start = Callable[..., System]


@pytest.mark.long
def test_a_small_job_does_not_wait_for_a_large_one(system: Start) -> None:
    # Both lengths, as the large job could hold the engine in its own bucket or fill the one they share.
    one = system(faults=("slow:0.3",), max_running=16)
    one.start_worker().wait_serving()
    large = one.submit(said(f"r{n}", "x" * 200 + f"{n}") for n in range(1500))
    one.wait_done(large, 32)
    began = time.monotonic()
    alike = one.submit(said(f"a{n}", "y" * 200 + f"{n}") for n in range(3))
    shorter = one.submit(said(f"s{n}", f"{n}") for n in range(3))
    assert one.finished(alike, 30).request_counts.completed == 3
    assert one.finished(shorter, 30).request_counts.completed == 3
    waited = time.monotonic() - began
    assert one.batch(large).status == "in_progress"
    assert waited < 20
    one.api.client.batches.cancel(large)
    one.finished(large)
    one.left_nothing()


RUNNING = 16


def submitted(one: System, tenant: str, count: int, text: str = "") -> str:
    """Submit a job of so many requests as a tenant; return its id."""
    context = one.api.context
    lines = [orjson.dumps(said(f"r{n}", f"{text} {tenant} {n}")) for n in range(count)]
    file = context.files.add(tenant, "in.jsonl", "batch", io.BytesIO(b"\n".join(lines)))
    new = NewBatch(endpoint="/v1/chat/completions", completion_window="24h", input_file_id=file.id)
    return context.acceptor.create(tenant, new, None, "").id


def done(one: System, tenant: str, job_ids: list[str]) -> int:
    counts = (one.api.context.batches.get(tenant, job_id).request_counts for job_id in job_ids)
    return sum(each.completed + each.failed for each in counts)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("jobs", "each"),
    [
        (8, 250),
        pytest.param(2, 50_000, marks=pytest.mark.long),
        pytest.param(50, 2_000, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("text", ["", "a longer prompt than those of the other tenant " * 5])
def test_a_tenant_with_much_queued_delays_another_by_a_few_groups(
    system: Callable[..., System], jobs: int, each: int, text: str
) -> None:
    one = system(faults=("slow:0.3",), max_running=RUNNING, lease_seconds=10)
    one.start_worker().wait_serving()
    large = [submitted(one, "large", each, text) for _ in range(jobs)]
    wait_until(lambda: all(one.ledger.job(job_id).planned for job_id in large), "planned", 300)
    wait_until(lambda: done(one, "large", large) > RUNNING, "running")
    before = done(one, "large", large)
    small = submitted(one, "small", 10)
    wait_until(lambda: one.api.context.batches.get("small", small).status == "completed", "small done", 60)
    others = done(one, "large", large) - before
    assert others <= 10 * RUNNING, f"{others} requests of the other tenant came first"
    for job_id in large:
        one.api.context.batches.cancel("large", job_id)
    wait_until(lambda: one.ledger.depth().control == 0, "all cancelled", 120)
    one.left_nothing()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_tenant_whose_jobs_are_being_planned_delays_another_by_a_few_groups(
    system: Callable[..., System],
) -> None:
    # The race: the plans keep the worker's threads, so the other's neither begins nor is finalized meanwhile.
    one = system(faults=("slow:0.3",), max_running=RUNNING, lease_seconds=10)
    one.start_worker().wait_serving()
    large = [submitted(one, "large", 50_000, "word " * 60) for _ in range(4)]
    wait_until(lambda: done(one, "large", large) > RUNNING, "running", 300)
    before = done(one, "large", large)
    small = submitted(one, "small", 10)
    wait_until(lambda: one.api.context.batches.get("small", small).status == "completed", "small done", 60)
    others = done(one, "large", large) - before
    assert not all(one.ledger.job(job_id).planned for job_id in large)
    assert others <= 20 * RUNNING, f"{others} requests of the other tenant came first"
    for job_id in large:
        one.api.context.batches.cancel("large", job_id)
    wait_until(lambda: one.ledger.depth().control == 0, "all cancelled", 120)
    one.left_nothing()
