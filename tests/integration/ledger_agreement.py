"""What must hold between Redis and the plain model of the ledger at any time."""

from itertools import product

import redis
from hypothesis.stateful import invariant

from jobs.buckets import BOUNDS
from jobs.ledger import Ledger
from jobs.records import PartEntry
from tests.integration.ledger_model import OPEN, Model

MODELS = ("a@1", "b@1")
TENANTS = ("default", "other")


class Agreement:
    """Invariants of a state machine that has a client, a ledger on it, and the model."""

    client: redis.Redis
    model: Model

    @property
    def ledger(self) -> Ledger:
        raise NotImplementedError

    @invariant()
    def jobs_agree(self) -> None:
        for job_id, job in self.model.jobs.items():
            found = self.ledger.job(job_id)
            assert found is not None
            assert (found.state, found.outcome) == (job.state, job.outcome)
            if not job.state.terminal:
                assert (found.completed, found.failed, list(found.usage)) == (
                    job.completed,
                    job.failed,
                    job.usage,
                )
                assert found.fed == job.fed
            assert found.live == len(job.live)
            size = sum(len(request.planned.to_json()) for request in job.live.values())
            assert int(self.client.hget(self.ledger._keys.name("job", job_id), "live_bytes") or 0) == size
            assert found.planned == job.planned
            left = self.client.hget(self.ledger._keys.name("open_requests"), job_id)
            counted = job.begun and job.state in OPEN
            assert not counted or int(left or 0) == (job.total or 0) - job.completed - job.failed
            assert (left is not None) == bool(counted)
            assert (job_id in self.ledger.tenants.open_jobs(job.record.tenant)) == (not job.state.terminal)
            assert self.ledger.parts(job_id) == [PartEntry(*entry) for entry in job.parts.items()]
            bits = self.ledger.done(job_id)
            assert {row for row in range(len(bits) * 8) if bits[row // 8] >> 7 - row % 8 & 1} == job.done
            stamps = [found.times[name] for name in ("created_at", "in_progress_at") if name in found.times]
            assert stamps == sorted(stamps)

    @invariant()
    def units_agree(self) -> None:
        keys = self.ledger._keys
        assert {unit.decode() for unit in self.client.hkeys(keys.name("control"))} == set(self.model.units)
        owners = {k.decode(): v.decode() for k, v in self.client.hgetall(keys.name("unit_owners")).items()}
        assert owners == {unit: token for unit, token in self.model.units.items() if token}
        places = self.client.zrange(keys.name("later"), 0, -1)
        for kind in ("plan", "feed", "finalize"):
            ready = {t: self.client.zrange(keys.name(f"ready_{kind}", t), 0, -1) for t in TENANTS}
            places += [unit for units in ready.values() for unit in units]
            waiting = self.client.zrange(keys.name(f"ready_{kind}"), 0, -1)
            assert {tenant.decode() for tenant in waiting} == {t for t, units in ready.items() if units}
        assert sorted(place.decode() for place in places) == sorted(self.model.units)
        deadlines = {job.decode() for job in self.client.zrange(keys.name("deadlines"), 0, -1)}
        assert deadlines == {job_id for job_id, job in self.model.jobs.items() if job.state in OPEN}

    @invariant()
    def what_is_left_agrees(self) -> None:
        keys, sums = self.ledger._keys, {name: [0, 0] for name in MODELS}
        for job_id, job in self.model.jobs.items():
            names = ["left_unfed", "left_tokens"]
            left = [int(n or 0) for n in self.client.hmget(keys.name("job", job_id), names)]
            assert min(left) >= 0
            assert job.state in OPEN or left == [0, 0]
            if job.fingerprint in sums:
                sums[job.fingerprint] = [a + b for a, b in zip(sums[job.fingerprint], left, strict=True)]
        for fingerprint, expected in sums.items():
            names = [f"unfed:{fingerprint}", f"tokens:{fingerprint}"]
            assert [int(n or 0) for n in self.client.hmget(keys.name("work"), names)] == expected

    @invariant()
    def requests_agree(self) -> None:
        keys, total = self.ledger._keys, 0
        for fingerprint in MODELS:
            live = {
                rid: request
                for job in self.model.jobs.values()
                if job.fingerprint == fingerprint
                for rid, request in job.live.items()
            }
            stored = self.client.hgetall(keys.name("requests", fingerprint))
            assert {rid.decode() for rid in stored} == set(live)
            total += sum(map(len, stored.values()))
            leased = {rid: request.owner for rid, request in live.items() if request.owner}
            owners = self.client.hgetall(keys.name("owners", fingerprint))
            assert {k.decode(): v.decode().split("|")[0] for k, v in owners.items()} == leased
            assert {m.decode() for m in self.client.zrange(keys.name("leases", fingerprint), 0, -1)} == set(
                leased
            )
            for name in ("running", "alone"):
                marked = {rid.decode() for rid in self.client.smembers(keys.name(name, fingerprint))}
                assert marked == {rid for rid, request in live.items() if getattr(request, name)}
            assert self.waiting("suspects", fingerprint) == self.model.suspects[fingerprint]
            turns = self.client.zrange(keys.name("turns", fingerprint), 0, -1)
            for bucket, tenant in product(BOUNDS, TENANTS):
                queue = self.model.queues[fingerprint, bucket, tenant]
                assert self.waiting("queue", fingerprint, bucket, tenant) == queue
                assert tenant.encode() in turns or not queue
        assert self.ledger.depth().fed_bytes == total

    def waiting(self, kind: str, fingerprint: str, *place: int | str) -> list[str]:
        """The requests that a queue would hand out: each once, stale entries passed over."""
        names = self.client.lrange(self.ledger._keys.name(kind, fingerprint, *place), 0, -1)
        rids = dict.fromkeys(name.decode().partition("|")[2] for name in names)
        return [
            rid
            for rid in rids
            if (request := self.model.request(rid, fingerprint)) is not None and request.owner is None
        ]
