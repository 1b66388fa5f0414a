"""What scaling reads: how much is left by model, whether or not it is in Redis, and who is there to do it."""

import socket
import time
from collections.abc import Iterator

import pytest
import redis

from jobs.ledger import Ledger
from jobs.ledger_fleet import Load, Present, Waiting
from tests.integration import ledger_support as support
from tests.integration.celery_worker import wait_until

MODEL = support.MODEL


@pytest.fixture
def ledger(redis_url: str) -> Iterator[Ledger]:
    with redis.Redis.from_url(redis_url) as client:
        yield Ledger(client, support.NAMESPACE, lease_seconds=3600)


def load(ledger: Ledger) -> Load:
    found, _ = ledger.fleet.load([MODEL])
    return found[MODEL]


def planned(ledger: Ledger, count: int, tokens: int, seconds: float = 86400) -> str:
    """Enter a job and plan it in one shard, nothing of it fed."""
    entered = support.record(seconds=seconds)
    ledger.create(entered)
    unit = support.claimed(ledger, "plan", entered.id)
    ledger.begin_plan(unit, count, "tiny", MODEL)
    ledger.add_shards(unit, [f"{entered.id}/shard"], count)
    ledger.end_plan(unit, count, tokens)
    return entered.id


def feed(ledger: Ledger, job_id: str, first: int, last: int, of: int) -> None:
    listed = support.requests(job_id, of)[first:last]
    unit = support.claimed(ledger, "feed", job_id)
    assert ledger.feed(unit, f"{job_id}/shard", first, listed, last=last == of)
    ledger.release_unit(unit)


def test_what_is_not_fed_yet_counts_as_queued(ledger: Ledger) -> None:
    support.repeating(ledger)
    job_id = planned(ledger, 10, 300)
    assert (load(ledger).queued, load(ledger).leased, load(ledger).tokens) == (10, 0, 300)
    feed(ledger, job_id, 0, 4, of=10)
    assert (load(ledger).queued, load(ledger).leased) == (10, 0)
    support.group_of(ledger, 3)
    assert (load(ledger).queued, load(ledger).leased) == (7, 3)
    feed(ledger, job_id, 4, 10, of=10)
    assert (load(ledger).queued, load(ledger).leased) == (7, 3)


def test_what_waits_is_what_can_be_claimed_and_how_long_the_oldest_has(ledger: Ledger) -> None:
    waits = lambda: ledger.fleet.waiting([MODEL])[MODEL]  # noqa: E731
    assert waits() == Waiting(0, 0.0, 0)
    job_id = planned(ledger, 10, 300)
    assert waits() == Waiting(0, 0.0, 10), "what is not fed cannot be claimed"
    feed(ledger, job_id, 0, 6, of=10)
    time.sleep(0.3)
    first = waits()
    assert (first.requests, first.unfed) == (6, 4)
    assert 0.3 <= first.oldest_seconds < 10
    group = support.group_of(ledger, 6)
    assert waits() == Waiting(0, 0.0, 4), "what is leased does not wait"
    ledger.release(MODEL, group.leases)
    assert waits().requests == 6
    assert waits().oldest_seconds >= first.oldest_seconds


def test_suspects_wait_too(ledger: Ledger) -> None:
    job_id = planned(ledger, 2, 10)
    feed(ledger, job_id, 0, 2, of=2)
    short = Ledger(ledger.redis, support.NAMESPACE, lease_seconds=0.05, grace_seconds=0)
    leases = support.group_of(short, 2).leases
    short.start(MODEL, leases)
    wait_until(lambda: ledger.reap([MODEL]).requeued == 2, "their leases ran out")
    found = ledger.fleet.waiting([MODEL])[MODEL]
    assert found.requests == 2
    assert found.oldest_seconds > 0


def test_tokens_go_down_as_requests_finish_and_what_finished_is_counted(ledger: Ledger) -> None:
    support.repeating(ledger)
    job_id = planned(ledger, 4, 12)
    feed(ledger, job_id, 0, 4, of=4)
    group = support.group_of(ledger, 3)
    ledger.complete(MODEL, job_id, "part", support.finished(group.leases))
    found = load(ledger)
    assert (found.queued, found.leased, found.tokens) == (1, 0, 3)
    assert (found.finished, found.prompt, found.completion) == (3, 9, 6)


@pytest.mark.parametrize("fed", [0, 5])
def test_nothing_is_left_of_a_cancelled_job(ledger: Ledger, fed: int) -> None:
    support.repeating(ledger)
    job_id = planned(ledger, 10, 300)
    if fed:
        feed(ledger, job_id, 0, fed, of=10)
    ledger.cancel(job_id)
    assert load(ledger) == Load()


def test_a_plan_that_starts_over_counts_once(ledger: Ledger) -> None:
    job_id = support.record().id
    ledger.create(support.record(job_id))
    for again in range(2):
        unit = support.claimed(ledger, "plan", job_id)
        ledger.begin_plan(unit, 6, "tiny", MODEL)
        ledger.add_shards(unit, [f"{job_id}/{again}"], 6)
        assert load(ledger).queued == 6
        ledger.release_unit(unit)


def test_deadlines_come_with_what_is_due_by_them_the_first_first(ledger: Ledger) -> None:
    planned(ledger, 10, 300, seconds=7200)
    planned(ledger, 2, 50, seconds=600)
    ledger.create(support.record(seconds=60))  # not planned: of no model yet
    found = load(ledger).due
    assert [(due.rows, due.tokens) for due in found] == [(2, 50), (10, 300)]
    assert [due.seconds for due in found] == [pytest.approx(600, abs=5), pytest.approx(7200, abs=5)]


def test_units_are_those_that_are_open(ledger: Ledger) -> None:
    assert ledger.fleet.load([MODEL])[1] == 0
    ledger.create(support.record())
    assert ledger.fleet.load([MODEL])[1] == 1


def test_jobs_that_are_fed_are_neither_begun_nor_ended(ledger: Ledger) -> None:
    counted = ledger.fleet.begun_and_ended
    assert counted() == 0
    entered = support.record()
    ledger.create(entered)
    assert counted() == 1
    unit = support.claimed(ledger, "plan", entered.id)
    ledger.release_unit(unit, 100)
    assert counted() == 1, "though it is due only later"
    job_id = planned(ledger, 4, 100)
    assert counted() == 1
    feed(ledger, job_id, 0, 4, of=4)
    assert counted() == 1
    ledger.cancel(job_id)
    assert counted() == 2


def test_one_autoscaler_at_a_time_changes_the_workers_of_a_model(ledger: Ledger) -> None:
    assert ledger.fleet.take_turn(MODEL, "a", 60)
    assert ledger.fleet.take_turn(MODEL, "a", 0.05)
    assert not ledger.fleet.take_turn(MODEL, "b", 60)
    assert ledger.fleet.take_turn("other@1", "b", 60)
    time.sleep(0.1)
    assert ledger.fleet.take_turn(MODEL, "b", 60)
    assert not ledger.fleet.take_turn(MODEL, "a", 60)


def test_a_clock_that_was_set_back_gives_nobody_the_turn_for_long(ledger: Ledger) -> None:
    ledger.redis.hset(ledger._keys.name("work"), f"turn:{MODEL}", f"a|{(time.time() + 7200) * 1000:.0f}")
    assert ledger.fleet.take_turn(MODEL, "b", 15)
    assert not ledger.fleet.take_turn(MODEL, "a", 15)


def test_who_reported_before_the_clock_was_set_back_is_not_there_until_he_does_again(ledger: Ledger) -> None:
    ledger.fleet.report(worker())
    name = ledger._keys.name("workers")
    _, _, facts = ledger.redis.hget(name, "w").partition(b"|")
    ledger.redis.hset(name, "w", b"%d|" % ((time.time() + 7200) * 1000) + facts)
    assert ledger.fleet.present() == []
    ledger.fleet.report(worker())
    assert len(ledger.fleet.present()) == 1


def test_what_was_learned_is_there_for_the_next(ledger: Ledger) -> None:
    assert ledger.fleet.pace(MODEL) == (None, None)
    ledger.fleet.note_pace(MODEL, 12.5, 60.0)
    assert ledger.fleet.pace(MODEL) == (12.5, 60.0)


def worker(name: str = "w") -> Present:
    return Present(name, socket.gethostname(), 1, MODEL, "serving", 3, 1, 0.5, 64)


def test_a_worker_is_there_until_it_leaves(ledger: Ledger) -> None:
    ledger.fleet.report(worker())
    ledger.fleet.report(worker("other"))
    assert {one.name for one in ledger.fleet.present()} == {"w", "other"}
    ledger.fleet.leave("other")
    (found,) = ledger.fleet.present()
    assert (found.model, found.held, found.units, found.capacity) == (MODEL, 3, 1, 64)


def test_a_worker_that_is_silent_is_forgotten(ledger: Ledger) -> None:
    ledger.fleet.report(worker())
    ledger.fleet.retire(["w"])
    name = ledger._keys.name("workers")
    facts = ledger.redis.hget(name, "w")
    ledger.redis.hset(name, "w", b"1|" + facts.partition(b"|")[2])
    assert ledger.fleet.present() == []
    assert not ledger.fleet.report(worker()), "nor is it told to retire when it comes back"


def test_a_worker_hears_with_its_next_report_that_it_is_to_retire(ledger: Ledger) -> None:
    assert not ledger.fleet.report(worker())
    ledger.fleet.retire(["w", "never heard of"])
    assert ledger.fleet.report(worker())
    assert ledger.redis.scard(ledger._keys.name("retiring")) == 1


def test_what_a_newer_worker_tells_besides_is_passed_over(ledger: Ledger) -> None:
    key = ledger._keys.name("workers")
    ledger.fleet.report(Present("w", "h", 1, MODEL, "serving", running=2))
    said = ledger.redis.hget(key, "w").decode()
    ledger.redis.hset(key, "w", said.replace("{", '{"humour":1,', 1))
    (found,) = ledger.fleet.present()
    assert (found.name, found.running) == ("w", 2)
