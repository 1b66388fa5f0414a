"""Units: leased steps of a job, by priority and deadline, back when their owner vanishes."""

from collections.abc import Iterator

import pytest
import redis

from jobs import errors
from jobs.ledger import Ledger
from tests.integration import ledger_support as support

MODEL = support.MODEL


@pytest.fixture
def ledger(redis_url: str) -> Iterator[Ledger]:
    with redis.Redis.from_url(redis_url) as client:
        yield Ledger(client, support.NAMESPACE, lease_seconds=3600)


def test_a_unit_is_leased_to_one_and_comes_back_when_its_owner_vanishes(ledger: Ledger) -> None:
    ledger.create(support.record())
    first = support.claimed(ledger, "plan")
    assert ledger.claim_unit() is None
    support.unit_runs_out(ledger, first)
    second = support.claimed(ledger, "plan")
    assert second.epoch > first.epoch
    assert (first.attempts, second.attempts) == (1, 2)
    assert not ledger.extend_unit(first)
    ledger.release_unit(first)
    assert ledger.extend_unit(second)
    with pytest.raises(errors.LeaseLost):
        ledger.begin_plan(first, 1, "tiny", MODEL)
    ledger.begin_plan(second, 1, "tiny", MODEL)


def test_a_lease_that_ran_out_but_that_nobody_took_may_be_extended(ledger: Ledger) -> None:
    mine, other = support.planning(ledger), support.planning(ledger)
    support.unit_runs_out(ledger, mine)
    # This claim finds the lease run out and makes the unit ready, and takes neither.
    assert ledger.claim_unit("finalize") is None
    assert ledger.extend_unit(mine)
    assert ledger.claim_unit() is None
    assert ledger.extend_unit(other)


def test_a_released_unit_is_due_at_once_or_after_its_delay(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    ledger.release_unit(unit)
    unit = support.claimed(ledger, "plan")
    assert unit.attempts == 1
    ledger.release_unit(unit, delay_seconds=60)
    assert ledger.claim_unit() is None
    assert ledger.claim_unit("plan", unit.job_id) is None
    assert ledger.depth().control == 1
    support.unit_runs_out(ledger, unit)
    assert support.claimed(ledger, "plan", unit.job_id).job_id == unit.job_id


def test_units_go_by_priority_then_deadline(ledger: Ledger) -> None:
    late = support.record(seconds=900)
    soon = support.record(seconds=60)
    important = support.record(seconds=5000, priority=3)
    lowly = support.record(seconds=1, priority=-1)
    for entered in (late, lowly, soon, important):
        ledger.create(entered)
    order = [support.claimed(ledger, "plan").job_id for _ in range(4)]
    assert order == [important.id, soon.id, late.id, lowly.id]


def test_a_unit_may_be_asked_for_by_job_and_kind(ledger: Ledger) -> None:
    ledger.create(support.record())
    wanted = support.record()
    ledger.create(wanted)
    assert ledger.claim_unit("feed", wanted.id) is None
    assert support.claimed(ledger, "plan", wanted.id).job_id == wanted.id
    assert ledger.claim_unit(job_id=wanted.id) is None


def test_a_lost_answer_to_a_unit_claim_is_given_again(ledger: Ledger) -> None:
    ledger.create(support.record())
    unit = ledger.claim_unit(token="mine")
    assert unit is not None
    assert ledger.claim_unit(token="mine") == unit
    support.unit_runs_out(ledger, unit)
    support.claimed(ledger, "plan")
    assert ledger.claim_unit(token="mine") is None
    assert ledger.claim_unit(token="late") is None
    ledger.create(support.record())
    assert ledger.claim_unit(token="late") is None


def test_a_plan_of_which_redis_lost_a_window_starts_over(ledger: Ledger) -> None:
    # The race: Redis is killed and restarts without its last second, in the middle of a plan.
    unit = support.planning(ledger, total=2)
    ledger.add_shards(unit, ["a"], 1)
    with pytest.raises(errors.LeaseLost):
        ledger.end_plan(unit, planned=2)
    ledger.add_shards(unit, ["b"], 1)
    ledger.end_plan(unit, planned=2)


def test_every_open_unit_counts_as_depth_until_it_is_closed(ledger: Ledger) -> None:
    unit = support.planning(ledger, total=1)
    assert ledger.depth().control == 1
    ledger.add_shards(unit, ["a"], 1)
    assert ledger.depth().control == 2
    ledger.end_plan(unit)
    assert ledger.depth().control == 1
    ledger.feed(support.claimed(ledger, "feed"), "a", 0, support.requests(unit.job_id, 1), last=True)
    assert ledger.depth().control == 0
    ledger.complete(MODEL, unit.job_id, "part", support.finished(support.group_of(ledger).leases))
    assert ledger.depth().control == 1
    support.finish(ledger, unit.job_id)
    assert ledger.depth().control == 0


def test_failures_of_a_unit_are_counted_with_their_reason_until_it_goes_well(ledger: Ledger) -> None:
    record = support.record()
    ledger.create(record)

    def failing() -> list[tuple[str, int, str]]:
        found = ledger.tenants.depth(record.tenant).failing
        assert list(found) == ledger.fleet.failing()
        return [(one.job_id, one.failures, one.reason) for one in found]

    assert failing() == []
    for count in (1, 2, 3):
        unit = support.claimed(ledger, "plan")
        assert ledger.release_unit(unit, 0, f"gone | {count} \ud800") == count
        assert ledger.release_unit(unit, 0, "twice") == count  # the answer to the first was lost
    assert failing() == [(record.id, 3, "gone | 3 \\ud800")]
    unit = support.claimed(ledger, "plan")
    assert unit.attempts == 1  # its worker did not vanish
    ledger.release_unit(unit)
    assert failing() == []


def test_a_unit_that_is_closed_fails_no_more(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    ledger.release_unit(unit, 0, "gone")
    ledger.cancel(unit.job_id)
    assert ledger.fleet.failing() == []
