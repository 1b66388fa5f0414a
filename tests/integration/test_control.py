"""How many steps of jobs a worker takes on at once."""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import errors, ids, plan
from jobs.embedded import RedisServer
from jobs.ledger import Ledger
from jobs.settings import Settings
from jobs.store_local import LocalStore
from tests.integration import ledger_support as support
from tests.integration.celery_worker import wait_until
from worker.control import PLANS_AT_ONCE, Control

_NO_MODEL = errors.ModelUnavailable(name="m", source="nowhere", reason="no such file")


@pytest.fixture
def settings(redis_server: RedisServer) -> Settings:
    return Settings(redis_url=redis_server.url, namespace=f"test-{uuid.uuid4().hex}")


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    ledger = Ledger.connect(settings)
    yield ledger
    ledger.close()


def test_a_worker_with_long_plans_still_takes_other_units(
    settings: Settings, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, done = LocalStore(tmp_path), threading.Event()
    control = Control(settings, ledger, store, lambda _: None)
    begun = []

    def long_plan(self: plan.Planner, sink: plan.Sink) -> None:
        begun.append(self.record.id)
        done.wait(20)

    monkeypatch.setattr(plan.Planner, "plan", long_plan)
    entered = [enter(ledger, store, "default") for _ in range(PLANS_AT_ONCE + 2)]
    threads = [threading.Thread(target=control.run_unit, args=("plan",)) for _ in range(PLANS_AT_ONCE)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(begun) == PLANS_AT_ONCE, "plans run")
    assert not control.run_unit("plan")
    assert not control.run_unit()  # nothing but plans waits
    waiting = next(job_id for job_id in entered if job_id not in begun)
    ledger.cancel(waiting)
    assert control.run_unit()
    assert store.size(f"jobs/{waiting}/manifest.json")
    done.set()
    for thread in threads:
        thread.join(10)
    assert control.run_unit("plan")
    assert len(begun) == PLANS_AT_ONCE + 1


def test_a_tenant_with_long_plans_does_not_keep_another_from_its_own(
    settings: Settings, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, done = LocalStore(tmp_path), threading.Event()
    control = Control(settings, ledger, store, lambda _: None)
    begun = []

    def long_plan(self: plan.Planner, sink: plan.Sink) -> None:
        begun.append(self.record.tenant)
        done.wait(20)

    monkeypatch.setattr(plan.Planner, "plan", long_plan)
    for _ in range(PLANS_AT_ONCE + 2):
        enter(ledger, store, "large")
    threads = [threading.Thread(target=control.run_unit, args=("plan",)) for _ in range(PLANS_AT_ONCE + 2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(begun) == PLANS_AT_ONCE, "plans run")
    enter(ledger, store, "small")
    third = threading.Thread(target=control.run_unit, args=("plan",))
    third.start()
    wait_until(lambda: "small" in begun, "the other tenant's plan runs", 5)
    assert not control.run_unit("plan")
    done.set()
    for thread in [*threads, third]:
        thread.join(10)
    assert begun == ["large"] * PLANS_AT_ONCE + ["small"]


def test_units_besides_plans_are_taken_while_plans_wait(
    settings: Settings, ledger: Ledger, tmp_path: Path
) -> None:
    control = Control(settings, ledger, LocalStore(tmp_path), lambda _: None)
    enter(ledger, LocalStore(tmp_path), "one")
    assert not control.run_unit(besides="plan")


def enter(ledger: Ledger, store: LocalStore, tenant: str) -> str:
    """Enter a job of the tenant; return its id."""
    record = support.record(ids.batch_id(), tenant=tenant)
    store.put(f"jobs/{record.id}/job.json", record.to_json())
    ledger.create(record)
    return record.id


def test_why_a_plan_fails_is_told_to_whoever_asks_and_counted(
    settings: Settings,
    ledger: Ledger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, raised = LocalStore(tmp_path), iter([_NO_MODEL, _NO_MODEL, RuntimeError("a secret")])
    control = Control(settings, ledger, store, lambda _: None)

    def fails(self: plan.Planner, sink: plan.Sink) -> None:
        raise next(raised)

    monkeypatch.setattr(plan.Planner, "plan", fails)
    monkeypatch.setattr("worker.control.RETRY_SECONDS", 0.0)
    job_id = enter(ledger, store, "default")
    told = []
    for _ in range(3):
        assert control.run_unit("plan")
        (failing,) = ledger.tenants.depth("default").failing
        told.append((failing.job_id, failing.kind, failing.failures, failing.reason))
    advised = "Model 'm' cannot be loaded from 'nowhere': no such file. Check LONGHAUL_MODELS."
    assert told == [
        (job_id, "plan", 1, advised),
        (job_id, "plan", 2, advised),
        (job_id, "plan", 3, "RuntimeError; the worker's log says more"),
    ]
    logged = [vars(line)["failures"] for line in caplog.records if line.getMessage() == "unit failed"]
    assert logged == [1, 2, 3]
