"""What may happen to the jobs of a ledger: steps for a state machine."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from jobs import errors
from jobs.ledger import Group, Ledger, Unit
from jobs.records import PlannedRequest
from tests.integration import ledger_support as support
from tests.integration.ledger_agreement import MODELS, TENANTS, Agreement
from tests.integration.ledger_model import OPEN, Illegal, Lost, Model

JOBS = 4
BUCKETS = (128, 256)
SELDOM = st.sampled_from([False] * 7 + [True])


class JobSteps(Agreement, RuleBasedStateMachine):
    """Steps of jobs and their units; each runs in the model and in Redis, and must answer the same."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.client = redis.Redis.from_url(self.url)
        self.client.flushall()
        self.model = Model()
        self.workers = [Ledger(self.client, support.NAMESPACE, lease_seconds=3600) for _ in range(2)]
        self.scripts = [support.repeating(worker) for worker in self.workers]
        self.units: list[Unit] = []
        self.groups: list[Group] = []
        self.plans: dict[str, list[list[PlannedRequest]]] = {}
        self.shards: dict[str, tuple[str, int]] = {}
        self.names = 0

    @initialize(twice=st.booleans())
    def lose_every_answer_once(self, twice: bool) -> None:
        for scripts in self.scripts:
            scripts.twice = twice

    def teardown(self) -> None:
        self.client.close()

    @property
    def ledger(self) -> Ledger:
        return self.workers[0]

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}-{self.names}"

    def both(self, expected: Callable[[], Any], actual: Callable[[], Any]) -> Any:
        """Run a step in the model and in Redis; both return the same, or both refuse."""
        try:
            wanted = expected()
        except Lost:
            with pytest.raises(errors.LeaseLost):
                actual()
            return None
        except Illegal:
            with pytest.raises(errors.Conflict):
                actual()
            return None
        assert actual() == wanted
        return wanted

    # Jobs

    @precondition(lambda self: sum(not job.state.terminal for job in self.model.jobs.values()) < JOBS)
    @rule(data=st.data(), straight=st.sampled_from([0, 1, 2, 2, 3]))
    def create(self, data: st.DataObject, straight: int) -> None:
        name, tenant = f"batch_{len(self.model.jobs):026}", data.draw(st.sampled_from(TENANTS))
        entered = support.record(name, priority=data.draw(st.integers(-1, 1)), tenant=tenant)
        rows = data.draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8]))
        plan: list[list[PlannedRequest]] = []
        row = 0
        while row < rows:
            followers = list(range(row + 1, min(rows, row + 1 + data.draw(st.integers(0, 1)))))
            request = support.request(entered.id, row, data.draw(st.sampled_from(BUCKETS)), followers)
            row += 1 + len(followers)
            if not plan or data.draw(st.booleans()):
                plan.append([])
            plan[-1].append(request)
        self.plans[entered.id] = plan
        self.both(lambda: self.model.create(entered), lambda: self.ledger.create(entered))
        if straight > 0:
            self.plan_straight(entered.id, end=straight < 3)
        if straight > 1:
            self.feed_straight(entered.id)

    def plan_straight(self, job_id: str, end: bool = True) -> None:
        unit = self.take(0, "plan", job_id)
        if unit is not None:
            self.begin(unit, MODELS[0])
            self.release_shards(unit, len(self.plans[job_id]))
            if end:
                self.both(lambda: self.model.end_plan(job_id, unit.token), lambda: self.ledger.end_plan(unit))

    def feed_straight(self, job_id: str) -> None:
        unit, job = self.take(0, "feed", job_id), self.model.jobs[job_id]
        while unit is not None and job.cursor < len(job.shards):
            self.feed_some(unit, job.shards[job.cursor], job.offset, 99)

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data())
    def go_straight_on(self, data: st.DataObject) -> None:
        job_id = self.draw_job(data)
        if self.model.jobs[job_id].state in OPEN:
            self.plan_straight(job_id)
            self.feed_straight(job_id)

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data())
    def create_again(self, data: st.DataObject) -> None:
        entered = self.model.jobs[self.draw_job(data)].record
        self.both(lambda: self.model.create(entered), lambda: self.ledger.create(entered))

    def draw_job(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model.jobs)))

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data(), sure=SELDOM)
    def cancel(self, data: st.DataObject, sure: bool) -> None:
        job_id = self.draw_job(data)
        if sure:
            self.both(lambda: self.model.cancel(job_id), lambda: self.ledger.cancel(job_id))

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data(), sure=SELDOM)
    def deadline_passes(self, data: st.DataObject, sure: bool) -> None:
        job_id = self.draw_job(data)
        if sure:
            support.deadline_passes(self.ledger, job_id)
            expired = [job_id] if self.model.expire(job_id) else []
            assert self.ledger.expire_due() == expired

    # Units

    @precondition(lambda self: self.model.units)
    @rule(kind=st.sampled_from([None, "plan", "feed", "finalize"]), worker=st.integers(0, 1))
    def claim_unit(self, kind: str | None, worker: int) -> None:
        self.take(worker, kind, None)

    def take(self, worker: int, kind: str | None, job_id: str | None) -> Unit | None:
        due = {
            unit
            for unit in self.model.units
            if self.is_due(unit) and unit.startswith(kind or "") and unit.endswith(job_id or "")
        }
        unit = self.workers[worker].claim_unit(kind, job_id)
        if unit is None:
            assert not due
            return None
        name = f"{unit.kind}:{unit.job_id}"
        ranks = self.client.hgetall(self.ledger._keys.name("control"))
        rank, tenant = ranks[name.encode()].split(b"|")
        same = (each for each in due if each.startswith(unit.kind))
        others = [ranks[each.encode()].split(b"|") for each in same]
        assert float(rank) == min(float(value) for value, whose in others if whose == tenant)
        self.model.units[name] = unit.token
        self.units.append(unit)
        return unit

    def is_due(self, unit: str) -> bool:
        score = self.client.zscore(self.ledger._keys.name("later"), unit)
        return score is None or float(score) <= self.milliseconds()

    def milliseconds(self) -> int:
        seconds, microseconds = self.client.time()
        return seconds * 1000 + microseconds // 1000

    def draw_unit(self, data: st.DataObject, kind: str) -> Unit:
        """Draw a unit somebody claimed, most often one that is still owned."""
        units = [unit for unit in self.units if unit.kind == kind]
        owned = [unit for unit in units if self.model.units.get(f"{kind}:{unit.job_id}") == unit.token]
        return data.draw(st.sampled_from(units if not owned or data.draw(SELDOM) else owned))

    @precondition(lambda self: self.units)
    @rule(data=st.data())
    def extend_unit(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(self.units))
        owned = self.model.units.get(f"{unit.kind}:{unit.job_id}") == unit.token
        assert self.ledger.extend_unit(unit) is owned

    @precondition(lambda self: self.units)
    @rule(data=st.data(), delay=st.sampled_from([0, 0, 60]))
    def release_unit(self, data: st.DataObject, delay: float) -> None:
        unit = data.draw(st.sampled_from(self.units))
        name = f"{unit.kind}:{unit.job_id}"
        if self.model.units.get(name) == unit.token:
            self.model.units[name] = None
        self.ledger.release_unit(unit, delay)

    @precondition(lambda self: self.units)
    @rule(data=st.data())
    def unit_runs_out(self, data: st.DataObject) -> None:
        support.unit_runs_out(self.ledger, data.draw(st.sampled_from(self.units)))

    # Plan

    def has(kind: str) -> Callable[["JobSteps"], bool]:  # type: ignore[misc]
        return lambda self: any(unit.kind == kind for unit in self.units)

    @precondition(has("plan"))
    @rule(data=st.data(), fingerprint=st.sampled_from([MODELS[0], *MODELS]))
    def begin_plan(self, data: st.DataObject, fingerprint: str) -> None:
        self.begin(self.draw_unit(data, "plan"), fingerprint)

    def begin(self, unit: Unit, fingerprint: str) -> None:
        total = sum(len(request.rows) for shard in self.plans[unit.job_id] for request in shard)
        self.both(
            lambda: self.model.begin_plan(unit.job_id, unit.token, total, fingerprint),
            lambda: self.ledger.begin_plan(unit, total, "tiny", fingerprint),
        )

    @precondition(has("plan"))
    @rule(data=st.data(), count=st.integers(1, 3))
    def add_shards(self, data: st.DataObject, count: int) -> None:
        self.release_shards(self.draw_unit(data, "plan"), count)

    def release_shards(self, unit: Unit, count: int) -> None:
        job = self.model.jobs[unit.job_id]
        places = range(len(self.plans[unit.job_id]))[len(job.shards) :][:count]
        names = [f"{unit.job_id}/{unit.epoch}/{place}" for place in places]
        self.shards |= {name: (unit.job_id, place) for name, place in zip(names, places, strict=True)}
        self.both(
            lambda: self.model.add_shards(unit.job_id, unit.token, names),
            lambda: self.ledger.add_shards(unit, names, len(names)),
        )

    @precondition(has("plan"))
    @rule(data=st.data(), early=SELDOM)
    def end_plan(self, data: st.DataObject, early: bool) -> None:
        unit = self.draw_unit(data, "plan")
        if early or len(self.model.jobs[unit.job_id].shards) == len(self.plans[unit.job_id]):
            self.both(
                lambda: self.model.end_plan(unit.job_id, unit.token), lambda: self.ledger.end_plan(unit)
            )

    @precondition(has("plan"))
    @rule(data=st.data(), sure=SELDOM)
    def fail(self, data: st.DataObject, sure: bool) -> None:
        unit = self.draw_unit(data, "plan")
        if sure:
            manifest = support.manifest(unit.job_id, "failed")
            self.both(
                lambda: self.model.fail(unit.job_id, unit.token), lambda: self.ledger.fail(unit, manifest)
            )

    # Feed

    @precondition(has("feed"))
    @rule(data=st.data(), count=st.integers(0, 3), stale=SELDOM)
    def feed(self, data: st.DataObject, count: int, stale: bool) -> None:
        unit = self.draw_unit(data, "feed")
        job = self.model.jobs[unit.job_id]
        known = [name for name, (job_id, _) in self.shards.items() if job_id == unit.job_id]
        shard = data.draw(st.sampled_from(known))
        if not stale and job.cursor < len(job.shards):
            shard = job.shards[job.cursor]
        self.feed_some(unit, shard, job.offset + stale, count)

    def feed_some(self, unit: Unit, shard: str, offset: int, count: int) -> None:
        rest = self.plans[unit.job_id][self.shards[shard][1]][offset:]
        taken = rest[:count]
        last = len(taken) == len(rest)
        time.sleep(
            0.002
        )  # no two feeds in one millisecond, so that the same steps give the same groups again
        self.both(
            lambda: self.model.feed(unit.job_id, unit.token, shard, offset, taken, last),
            lambda: self.ledger.feed(unit, shard, offset, taken, last),
        )

    # Finalize

    @precondition(has("finalize"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        unit = self.draw_unit(data, "finalize")
        state = self.model.jobs[unit.job_id].outcome or "completed"
        manifest = support.manifest(unit.job_id, state)
        self.both(
            lambda: self.model.finish(unit.job_id, unit.token, state),
            lambda: self.ledger.finish(unit, manifest),
        )
