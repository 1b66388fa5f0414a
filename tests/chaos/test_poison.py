"""Requests that end whatever process runs them: they fail alone, and nobody else waits or fails for them."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.keeper import Keeper
from tests.chaos.rounds import Watch
from tests.integration.system.system import System, said
from worker import watchdog

Start = Callable[..., System]
SHORT = {"lease_seconds": 1, "heartbeat_seconds": 0.3, "drain_seconds": 3}
# Far more than an idle worker takes, far less than there is.
MEMORY_BYTES = 3 << 30
KINDS = {
    "kill": ("poison: kills its process", -signal.SIGKILL),
    "hang": ("poison: hangs the engine", watchdog.EXIT_CODE),
    "break": ("poison: makes the engine raise", 1),
    "memory": ("poison: uses all memory", 1),
}


def names(count: int, job: str = "r") -> list[str]:
    return [f"{job}{n}" for n in range(count)]


def poisoned(expected: list[str], poison: dict[str, str], **body: Any) -> list[dict[str, Any]]:
    """Return requests with these names, and other texts for those that are to be poison."""
    return [said(name, poison.get(name, f"text {name}"), **body) for name in expected]


def lost(one: System, job_id: str) -> list[str]:
    """Return whose line says that it was given up; fail if any other error is there."""
    failed = one.lines(job_id)[1]
    assert {(line["response"], line["error"]["code"]) for line in failed} <= {(None, "worker_lost")}
    return [line["custom_id"] for line in failed]


@pytest.mark.parametrize(
    "kind",
    # A hang is an everyday test in test_watchdog.py; memory that is short raises in the engine too.
    ["kill", "memory", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("hang", "break"))],
)
def test_a_poison_request_fails_alone_after_two_deaths_alone(
    system: Start, tmp_path: Path, kind: str
) -> None:
    fault, status = KINDS[kind]
    trace = tmp_path / "computed"
    hangs = {"step_timeout_seconds": 1.5} if kind == "hang" else {}
    one = system(faults=(f"{kind}:poison", f"trace:{trace}"), max_running=8, **SHORT, **hangs)
    watch = Watch(one, trace)
    expected = names(20)
    job_id = one.submit(poisoned(expected, {"r3": "poison"}))
    watch.struck()
    with Keeper(one, memory_bytes=MEMORY_BYTES) as keeper:
        made = watch.settle(fault, {job_id: expected})
    assert lost(one, job_id) == ["r3"]
    assert (made.lost, made.doubled, made.recomputed) == (0, 0, 0)
    # Once with its batch, once with the other suspects, twice alone.
    assert keeper.ended == [status] * 4
    groups = [group for worker in one.workers for group in worker.events("group claimed")]
    assert [group["requests"] for group in groups if group["alone"]].count(1) >= 2


def test_two_workers_and_poison_in_two_jobs_with_a_follower(system: Start, tmp_path: Path) -> None:
    # Races: both workers die at once, and one runs suspects while the other claims what is new.
    trace = tmp_path / "computed"
    one = system(faults=("kill:poison", "slow:0.1", f"trace:{trace}"), max_running=8, **SHORT)
    watch = Watch(one, trace)
    ours, theirs = names(20, "a"), names(20, "b")
    twins = {"a3": "poison", "a11": "poison"}
    jobs = {
        one.submit(poisoned(ours, twins, temperature=0)): ours,
        one.submit(poisoned(theirs, {"b7": "another poison"})): theirs,
    }
    watch.struck()
    with Keeper(one, 2, on_end=watch.struck) as keeper:
        made = watch.settle("poison: two in two jobs, two workers", jobs)
    assert [lost(one, job_id) for job_id in jobs] == [["a3", "a11"], ["b7"]]
    assert (made.lost, made.doubled) == (0, 0)
    # The twin of a poison request is not run: only two requests kill.
    assert len(keeper.ended) <= 8
