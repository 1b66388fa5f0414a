"""Any sequence of steps, by workers that die or come late: Redis and the plain model agree after each."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
    run_state_machine_as_test,
)

from jobs import ids
from jobs.ledger import Finished, Group, Lease
from tests.integration import ledger_support as support
from tests.integration.ledger_agreement import MODELS
from tests.integration.ledger_steps import BUCKETS, SELDOM, JobSteps


class Steps(JobSteps):
    """All steps: those of jobs, those of workers, and calls that come late."""

    @precondition(lambda self: self.busy_models())
    @rule(data=st.data(), idle=st.booleans())
    def claim(self, data: st.DataObject, idle: bool) -> None:
        self.claim_some(data, idle)

    @precondition(lambda self: self.busy_models())
    @rule(data=st.data(), idle=st.sampled_from([True, True, False]))
    def claim_and_die_running(self, data: st.DataObject, idle: bool) -> None:
        group = self.claim_some(data, idle)
        if group is not None:
            self.die(group, started=True)
            self.reap_all(group.leases[0].fingerprint)

    @precondition(lambda self: self.busy_models())
    @rule(data=st.data(), idle=st.booleans())
    def claim_and_complete(self, data: st.DataObject, idle: bool) -> None:
        group = self.claim_some(data, idle)
        for job_id in sorted({lease.request.job_id for lease in group.leases} if group else ()):
            rows = support.finished([lease for lease in group.leases if lease.request.job_id == job_id])
            self.complete_both(group.leases[0].fingerprint, job_id, rows)

    def busy_models(self) -> list[str]:
        waiting = (job for job in self.model.jobs.values() if any(not r.owner for r in job.live.values()))
        return sorted({job.fingerprint for job in waiting})

    def claim_some(self, data: st.DataObject, idle: bool) -> Group | None:
        fingerprint = data.draw(st.sampled_from(self.busy_models()))
        worker, count = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 5))
        prefer = data.draw(st.sampled_from([None, *BUCKETS]))
        turns = self.turns(fingerprint)
        first = turns[0] if turns else ""
        preferred = self.model.queues[fingerprint, prefer or 0, first]
        bucket = prefer if preferred else self.oldest(fingerprint, first)
        ledger, token = self.workers[worker], ids.ulid()
        rids = self.model.claim(ledger.worker, token, fingerprint, count, turns, bucket, idle)
        group = ledger.claim(fingerprint, count, prefer, idle, token=token)
        assert [lease.rid for lease in group.leases] == rids if group else not rids
        if group is None:
            return None
        self.groups.append(group)
        for lease in group.leases:
            request = self.model.request(lease.rid, fingerprint)
            assert request is not None
            assert (lease.request.rows, lease.attempts) == (request.planned.rows, request.attempts)
            assert group.alone is (request.attempts > 0)
            assert lease.request.bucket == group.bucket
        return group

    def turns(self, fingerprint: str) -> list[str]:
        """The tenants with something that waits, in turn: that is checked in test_ledger_tenants."""
        found = self.client.zrange(self.ledger._keys.name("turns", fingerprint), 0, -1)
        waiting = {
            tenant for (model, _, tenant), rids in self.model.queues.items() if rids and model == fingerprint
        }
        return [tenant.decode() for tenant in found if tenant.decode() in waiting]

    def oldest(self, fingerprint: str, tenant: str) -> int | None:
        """The bucket whose first request waits longest, by the times in Redis (stale entries passed over)."""
        heads = {}
        for bucket in BUCKETS:
            waiting = self.model.queues[fingerprint, bucket, tenant]
            name = self.ledger._keys.name("queue", fingerprint, bucket, tenant)
            for entry in self.client.lrange(name, 0, -1):
                since, _, rid = entry.decode().partition("|")
                if rid in waiting[:1]:
                    heads[int(since), bucket] = bucket
        return heads[min(heads)] if heads else None

    def draw_group(self, data: st.DataObject) -> Group:
        """Draw a group that was claimed, most often one of which something is still owned."""
        owned = [
            group
            for group in self.groups
            if len(self.model.lost(group.leases[0].fingerprint, self.pairs(group.leases))) < len(group.leases)
        ]
        return data.draw(st.sampled_from(self.groups if not owned or data.draw(SELDOM) else owned))

    def draw_leases(self, data: st.DataObject) -> tuple[str, list[Lease]]:
        group = self.draw_group(data)
        size = data.draw(st.integers(1, len(group.leases)))
        return group.leases[0].fingerprint, group.leases[:size]

    def pairs(self, leases: list[Lease]) -> list[tuple[str, str]]:
        return [(lease.rid, lease.token) for lease in leases]

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        model, leases = self.draw_leases(data)
        self.both(
            lambda: self.model.start(model, self.pairs(leases)), lambda: self.ledger.start(model, leases)
        )

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        model, leases = self.draw_leases(data)
        self.both(
            lambda: self.model.lost(model, self.pairs(leases)), lambda: self.ledger.extend(model, leases)
        )

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        model, leases = self.draw_leases(data)
        self.both(
            lambda: self.model.release(model, self.pairs(leases)), lambda: self.ledger.release(model, leases)
        )

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), failed=st.booleans())
    def complete(self, data: st.DataObject, failed: bool) -> None:
        model, leases = self.draw_leases(data)
        job_id = leases[0].request.job_id
        rows = support.finished([lease for lease in leases if lease.request.job_id == job_id], failed)
        self.complete_both(model, job_id, rows)

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data(), failed=st.sampled_from([True, False, None]))
    def complete_without_a_token(self, data: st.DataObject, failed: bool | None) -> None:
        job_id = self.draw_job(data)
        requests = [request for shard in self.plans[job_id] for request in shard]
        chosen = data.draw(st.lists(st.sampled_from(requests), max_size=2)) if requests else []
        rows = [Finished(item.id, None, row, failed, 1, 1, 1) for item in chosen for row in item.rows]
        self.complete_both(None, job_id, rows)

    def complete_both(self, model: str | None, job_id: str, rows: list[Finished]) -> None:
        part = self.name("part")
        for _ in range(2):
            self.both(
                lambda: self.model.complete(model, job_id, part, rows),
                lambda: self.ledger.complete(model, job_id, part, rows),
            )

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), started=st.booleans())
    def worker_dies(self, data: st.DataObject, started: bool) -> None:
        self.die(self.draw_group(data), started)

    def die(self, group: Group, started: bool) -> None:
        fingerprint = group.leases[0].fingerprint
        if started:
            self.both(
                lambda: self.model.start(fingerprint, self.pairs(group.leases)),
                lambda: self.ledger.start(fingerprint, group.leases),
            )
        lost = self.model.lost(fingerprint, self.pairs(group.leases))
        support.leases_run_out(self.ledger, [lease for lease in group.leases if lease.rid not in lost])

    @precondition(lambda self: any(self.expired(fingerprint) for fingerprint in MODELS))
    @rule()
    def reap(self) -> None:
        for fingerprint in MODELS:
            self.reap_all(fingerprint)

    def expired(self, fingerprint: str) -> list[bytes]:
        leases = self.ledger._keys.name("leases", fingerprint)
        return self.client.zrangebyscore(leases, 0, self.milliseconds())

    def reap_all(self, fingerprint: str) -> None:
        expired = self.expired(fingerprint)
        reaped = self.ledger.reap([fingerprint])
        token = reaped.given_up[0].token if reaped.given_up else ""
        requeued, given_up = self.model.reap(fingerprint, token, [rid.decode() for rid in expired])
        assert (reaped.requeued, [lease.rid for lease in reaped.given_up]) == (requeued, given_up)
        if reaped.given_up:
            self.groups += [
                Group(lease.request.bucket, [lease], False, lease.epoch) for lease in reaped.given_up
            ]

    @precondition(lambda self: self.scripts[0].log)
    @rule(back=st.integers(1, 40))
    def a_duplicate_comes_late(self, back: int) -> None:
        log = self.scripts[0].log
        self.scripts[0].replay(max(0, len(log) - back))


@pytest.mark.parametrize(
    ("sequences", "steps"),
    [
        pytest.param(15, 40, id="short"),
        pytest.param(200, 50, id="10000-steps", marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_every_sequence_of_steps_agrees_with_the_model(redis_url: str, sequences: int, steps: int) -> None:
    Steps.url = redis_url
    limits = settings(
        max_examples=sequences,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=[
            Phase.generate
        ],  # a failing sequence is short enough to read; making it shorter takes minutes
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Steps, settings=limits)
