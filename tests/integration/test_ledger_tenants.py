"""Tenants take turns: who has much waiting does not keep others waiting, and nobody has more than a quota."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

from jobs import ids
from jobs.ledger import Ledger
from jobs.records import PlannedRequest
from tests.integration import ledger_support as support

MODEL = support.MODEL


@pytest.fixture
def ledger(redis_url: str) -> Iterator[Ledger]:
    with redis.Redis.from_url(redis_url) as client:
        yield Ledger(client, support.NAMESPACE, lease_seconds=3600)


def job(ledger: Ledger, tenant: str, count: int, bucket: int = 128, priority: int = 0) -> str:
    """Enter, plan and feed a job of the tenant."""
    job_id = ids.batch_id()
    listed = [support.request(job_id, row, bucket) for row in range(count)]
    return fed(ledger, tenant, job_id, listed, priority)


def fed(ledger: Ledger, tenant: str, job_id: str, listed: list[PlannedRequest], priority: int = 0) -> str:
    assert ledger.create(support.record(job_id, tenant=tenant, priority=priority))
    shard = f"{job_id}/shard"
    support.plan(ledger, job_id, [shard], len(listed), MODEL)
    assert ledger.feed(support.claimed(ledger, "feed", job_id), shard, 0, listed, last=True)
    return job_id


def whose(ledger: Ledger, count: int, **options: int) -> Counter[str]:
    """Claim so many; return how many of them are of each job."""
    group = ledger.claim(MODEL, count, **options)
    return Counter(lease.request.job_id for lease in group.leases) if group else Counter()


def test_who_comes_after_a_thousand_requests_of_another_is_next(ledger: Ledger) -> None:
    large = [job(ledger, "large", 500), job(ledger, "large", 500)]
    for _ in range(4):
        assert whose(ledger, 64).total() == 64
    small = job(ledger, "small", 10)
    claims = [whose(ledger, 64) for _ in range(2)]
    assert sum(claims, Counter())[small] == 10
    assert all(set(found) <= {*large, small} for found in claims)


def test_who_comes_with_another_length_is_next_too(ledger: Ledger) -> None:
    # The race: the large tenant's requests have waited longer, and the worker prefers their bucket.
    job(ledger, "large", 500)
    whose(ledger, 64)
    small = job(ledger, "small", 10, bucket=512)
    assert sum((whose(ledger, 64, prefer=128) for _ in range(2)), Counter())[small] == 10


def test_two_who_have_much_get_the_same(ledger: Ledger) -> None:
    one, other = job(ledger, "one", 300), job(ledger, "other", 300)
    got = sum((whose(ledger, 7) for _ in range(20)), Counter())
    assert got.total() == 140
    assert abs(got[one] - got[other]) <= 7


def test_a_tenant_with_many_jobs_gets_no_more_than_one_with_one(ledger: Ledger) -> None:
    many = {job(ledger, "many", 40) for _ in range(8)}
    one = job(ledger, "one", 300)
    got = sum((whose(ledger, 8) for _ in range(30)), Counter())
    assert abs(got[one] - sum(got[each] for each in many)) <= 8


def test_who_leaves_and_comes_back_gains_nothing(ledger: Ledger) -> None:
    # The race: a tenant's queue runs empty with each claim, and is fed anew before the next one.
    always = job(ledger, "b-always", 100)
    got: Counter[str] = Counter()
    for _ in range(10):
        job(ledger, "a-new", 5)
        got += whose(ledger, 5)
    assert got[always] >= 25
    assert got.total() == 50


def test_a_group_is_filled_with_what_others_have_in_the_same_bucket(ledger: Ledger) -> None:
    jobs = [job(ledger, tenant, 3) for tenant in ("a", "b", "c")]
    job(ledger, "d", 3, bucket=256)
    assert whose(ledger, 9) == dict.fromkeys(jobs, 3)


def test_priority_counts_within_a_tenant_only(ledger: Ledger) -> None:
    for priority in (100, 100, 0):
        ledger.create(support.record(tenant="loud", priority=priority))
    ledger.create(support.record("batch_" + "q" * 26, tenant="quiet"))
    first = [support.claimed(ledger, "plan").job_id for _ in range(2)]
    assert "batch_" + "q" * 26 in first


def test_a_tenant_with_many_units_does_not_keep_anothers_waiting(ledger: Ledger) -> None:
    for _ in range(50):
        ledger.create(support.record(tenant="many", seconds=60))
    for _ in range(10):
        support.claimed(ledger, "plan")
    late = support.record(tenant="one", seconds=86400)
    ledger.create(late)
    assert late.id in [support.claimed(ledger, "plan").job_id for _ in range(2)]


def test_units_of_other_kinds_do_not_keep_plans_waiting(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    ledger.add_shards(unit, ["shard"], 8)
    for _ in range(5):
        ledger.create(support.record(tenant="other"))
    kinds = []
    for _ in range(6):
        claimed = ledger.claim_unit()
        assert claimed is not None
        kinds.append(claimed.kind)
        if claimed.kind == "feed":
            ledger.release_unit(claimed)
    assert kinds.count("plan") >= 3
    assert "feed" in kinds
    assert ledger.claim_unit(besides="plan").kind == "feed"


def test_a_tenants_requests_come_back_to_their_own_queue(ledger: Ledger) -> None:
    one, other = job(ledger, "one", 4), job(ledger, "other", 4)
    group = ledger.claim(MODEL, 8)
    assert group is not None
    ledger.release(MODEL, group.leases[:4])
    support.leases_run_out(ledger, group.leases[4:])
    ledger.reap([MODEL])
    for tenant, job_id in (("one", one), ("other", other)):
        depth = ledger.tenants.depth(tenant).models[MODEL]
        assert (depth["queued"], depth["leased"], depth["buckets"]) == (4, 0, {128: 4})
        assert ledger.tenants.open_jobs(tenant) == [job_id]
    assert whose(ledger, 8) == {one: 4, other: 4}


def test_a_tenant_sees_the_depth_of_its_own(ledger: Ledger) -> None:
    job(ledger, "one", 5)
    job(ledger, "other", 7)
    ledger.create(support.record(tenant="other"))
    depth = ledger.tenants.depth("one")
    assert depth.models == {MODEL: {"queued": 5, "leased": 0, "suspects": 0, "buckets": {128: 5}}}
    assert (depth.control, ledger.tenants.depth("other").control) == (0, 1)
    assert ledger.tenants.depth("nobody").models == {}
    assert ledger.depth().models[MODEL]["buckets"] == {128: 12}


def test_who_has_nothing_waiting_is_forgotten(ledger: Ledger) -> None:
    done, cancelled = job(ledger, "one", 2), job(ledger, "two", 2)
    group = ledger.claim(MODEL, 2)
    assert group is not None
    ledger.complete(MODEL, group.leases[0].request.job_id, "part", support.finished(group.leases))
    ledger.cancel(cancelled if group.leases[0].request.job_id == done else done)
    for _ in (done, cancelled):
        unit = support.claimed(ledger, "finalize")
        ledger.finish(unit, support.manifest(unit.job_id))
    assert [key for key in ledger.redis.scan_iter("*") if b"turns" in key or b"given" in key] == []


# Quotas


def reserve(ledger: Ledger, job_id: str, requests: int, tokens: int = 0, tenant: str = "t") -> object:
    return ledger.tenants.reserve(tenant, job_id, requests, tokens, 10, 1000)


def test_a_tenant_has_no_more_open_than_its_quota(ledger: Ledger) -> None:
    assert reserve(ledger, "a", 6) is None
    assert reserve(ledger, "b", 5) == ("requests", 6)
    assert reserve(ledger, "b", 4, 1001) == ("tokens", 0)
    assert reserve(ledger, "b", 4, 1000) is None
    assert reserve(ledger, "c", 1) == ("requests", 10)
    assert reserve(ledger, "c", 1, tenant="other") is None


def test_a_repeated_reservation_is_one(ledger: Ledger) -> None:
    assert reserve(ledger, "a", 6) is None
    assert reserve(ledger, "a", 6) is None
    assert reserve(ledger, "b", 4) is None


def test_a_reservation_that_is_not_used_is_given_back_or_lapses(ledger: Ledger) -> None:
    reserve(ledger, "a", 6)
    ledger.tenants.give_back("t", "a")
    assert reserve(ledger, "b", 10) is None
    ledger.redis.zadd(ledger._keys.name("open", "t"), {"b": 1})
    assert reserve(ledger, "c", 10) is None
    assert ledger.redis.hkeys(ledger._keys.name("open_requests")) == [b"c"]


def test_a_job_that_was_entered_is_not_given_back(ledger: Ledger) -> None:
    entered = support.record(tenant="t")
    reserve(ledger, entered.id, 6)
    ledger.create(entered)
    ledger.tenants.give_back("t", entered.id)
    assert reserve(ledger, "b", 5) == ("requests", 6)


def test_finished_requests_and_ended_jobs_free_their_quota(ledger: Ledger) -> None:
    name = ids.batch_id()
    reserve(ledger, name, 10)
    fed(ledger, "t", name, [support.request(name, row) for row in range(10)])
    assert reserve(ledger, "b", 1) == ("requests", 10)
    group = support.group_of(ledger, 4)
    ledger.complete(MODEL, name, "part", support.finished(group.leases))
    assert reserve(ledger, "b", 5) == ("requests", 6)
    ledger.cancel(name)
    assert reserve(ledger, "b", 10) is None
    support.finish(ledger, name, "cancelled")
    assert ledger.tenants.open_jobs("t") == ["b"]


def test_a_job_that_fails_frees_its_quota(ledger: Ledger) -> None:
    entered = support.record(tenant="t")
    reserve(ledger, entered.id, 10)
    ledger.create(entered)
    ledger.fail(support.claimed(ledger, "plan"), support.manifest(entered.id, "failed"))
    assert reserve(ledger, "b", 10) is None


def test_a_plan_corrects_what_the_file_looked_like(ledger: Ledger) -> None:
    entered = support.record(tenant="t")
    reserve(ledger, entered.id, 10, 1000)
    ledger.create(entered)
    unit = support.claimed(ledger, "plan")
    ledger.begin_plan(unit, 3, "tiny", MODEL)
    ledger.add_shards(unit, ["shard"], 3)
    ledger.end_plan(unit, 3, 200)
    assert reserve(ledger, "b", 7, 800) is None
    assert reserve(ledger, "c", 1) == ("requests", 10)


def test_calls_beyond_the_rate_are_told_when_to_come_again(ledger: Ledger) -> None:
    assert [ledger.tenants.wait_seconds("t", 60) for _ in range(60)] == [0] * 60
    assert 0 < ledger.tenants.wait_seconds("t", 60) <= 1
    assert ledger.tenants.wait_seconds("other", 60) == 0


def test_uploads_at_once_count_each_other(ledger: Ledger) -> None:
    assert ledger.tenants.hold_bytes("t", "a", 100) == 0
    assert ledger.tenants.hold_bytes("t", "b", 50) == 100
    assert ledger.tenants.hold_bytes("t", "a", 100) == 50
    ledger.tenants.let_bytes_go("t", "a", 100)
    assert ledger.tenants.hold_bytes("t", "c", 1) == 50


def test_a_clock_of_redis_that_is_set_back_keeps_nobody_waiting(ledger: Ledger) -> None:
    ledger.tenants.wait_seconds("a", 60)
    name = f"{{{support.NAMESPACE}}}:rate:a"
    paid = float(ledger.redis.get(name))
    ledger.redis.set(name, paid + 3600_000)  # what an hour earlier had lain a moment ahead
    assert ledger.tenants.wait_seconds("a", 60) <= 1


def test_a_look_at_a_tenant_with_many_jobs_is_no_long_script(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 5,000 jobs it kept all others from Redis for half a second.
    for _ in range(60):
        job(ledger, "many", 1)
    look, sizes = ledger.tenants._scripts.look, []

    def counted(asked: Sequence[tuple[str, str]]) -> list[Any]:
        sizes.append(len(asked))
        return look(asked)

    monkeypatch.setattr(ledger.tenants._scripts, "look", counted)
    assert ledger.tenants.depth("many").models[MODEL]["queued"] == 60
    assert max(sizes) < 60
