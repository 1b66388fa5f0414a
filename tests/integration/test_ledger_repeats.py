"""Clients repeat what they got no answer to: every script runs twice, late, or on a Redis that restarted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from jobs import embedded, ledger_scripts
from jobs.ledger import Ledger, State
from tests.integration import ledger_support as support

MODEL = support.MODEL


@pytest.fixture
def ledger(redis_url: str) -> Iterator[Ledger]:
    with redis.Redis.from_url(redis_url) as client:
        yield Ledger(client, support.NAMESPACE, lease_seconds=3600)


def a_life(ledger: Ledger) -> Iterator[str]:
    """Take jobs through every script there is; yield after each step."""
    doomed = support.record()
    ledger.create(doomed)
    ledger.fail(support.claimed(ledger, "plan"), support.manifest(doomed.id, "failed", failed_at=5.0))
    yield "failed"
    entered = support.record()
    recovering = ledger.recover(entered)
    assert recovering is not None
    ledger.release_unit(recovering)
    yield "recovered"
    unit = support.claimed(ledger, "plan")
    ledger.begin_plan(unit, 7, "tiny", MODEL)
    ledger.extend_unit(unit)
    ledger.add_shards(unit, ["a"], 4)
    yield "first window"
    feeder = support.claimed(ledger, "feed")
    ledger.feed_state(feeder)
    listed = support.requests(entered.id, 7)
    ledger.feed(feeder, "a", 0, listed[:2], last=False)
    ledger.feed(feeder, "a", 2, listed[2:4], last=True)
    ledger.release_unit(feeder, 0)
    yield "fed"
    ledger.add_shards(unit, ["b"], 3)
    ledger.end_plan(unit)
    feeder = support.claimed(ledger, "feed")
    ledger.feed(feeder, "b", 0, listed[4:], last=True)
    yield "all fed"
    group = support.group_of(ledger, 2)
    ledger.start(MODEL, group.leases)
    ledger.extend(MODEL, group.leases)
    ledger.complete(MODEL, entered.id, "one", support.finished(group.leases[:1]))
    ledger.release(MODEL, group.leases[1:])
    yield "released"
    group = support.group_of(ledger, 1)
    support.die_running(ledger, group)
    ledger.reap([MODEL])
    for _ in range(2):
        support.die_running(ledger, support.group_of(ledger, idle=True))
        reaped = ledger.reap([MODEL])
        yield "died"
    ledger.complete(MODEL, entered.id, "lost", support.finished(reaped.given_up, failed=True))
    yield "given up"
    group = support.group_of(ledger)
    ledger.complete(MODEL, entered.id, "rest", support.finished(group.leases))
    yield "done"
    support.finish(ledger, entered.id)
    yield "finished"
    cancelled = support.job_of(ledger, 2)
    support.group_of(ledger, 1)
    ledger.cancel(cancelled)
    support.finish(ledger, cancelled, "cancelled")
    expired = support.job_of(ledger, 2)
    support.deadline_passes(ledger, expired)
    ledger.expire_due()
    support.finish(ledger, expired, "expired")
    ledger.job(expired)
    yield "all ended"


def test_a_life_in_which_every_answer_is_lost_once_is_the_same_life(ledger: Ledger) -> None:
    scripts = support.repeating(ledger)
    for _ in a_life(ledger):
        pass
    # Those of calls and of workers, not of lives.
    quotas = {"reserve", "give_back", "pass", "hold_bytes", "let_bytes_go"}
    fleet = {"report", "leave", "retire", "fleet", "turn", "due", "waiting"}
    assert {name for name, _, _ in scripts.log} == set(ledger_scripts.sources()) - quotas - fleet
    depth = ledger.depth()
    assert depth.control == depth.fed_bytes == 0
    assert depth.models[MODEL] == {"queued": 0, "leased": 0, "suspects": 0, "buckets": {}}


def test_no_duplicate_changes_anything_however_late_it_comes(ledger: Ledger) -> None:
    # The race: a call waits in a broken connection's buffer while its repetition and the next steps pass it.
    scripts = support.repeating(ledger, twice=False)
    for step in a_life(ledger):
        before = support.snapshot(ledger)
        for call in range(len(scripts.log)):
            scripts.replay(call)
            assert support.snapshot(ledger) == before, (step, scripts.log[call][0], scripts.log[call][2])


def test_scripts_that_redis_has_forgotten_are_sent_again(ledger: Ledger) -> None:
    support.job_of(ledger, 1)
    ledger.redis.script_flush()
    assert support.rows_of(support.group_of(ledger)) == [0]


def test_a_restart_of_redis_with_its_data_is_noticed_by_nobody(tmp_path: Path) -> None:
    server = embedded.RedisServer(tmp_path, tmp_path / "redis.log")
    try:
        server.wait_ready()
        with ledger_scripts.connect(server.url) as client:
            ledger = Ledger(client, support.NAMESPACE, lease_seconds=3600)
            job_id = support.job_of(ledger, 2)
            group = support.group_of(ledger, 1)
            client.config_set("appendfsync", "always")
            ledger.extend(MODEL, group.leases)
            before = support.snapshot(ledger)
            server.server.kill()
            server = embedded.RedisServer(tmp_path, tmp_path / "redis.log", server.port)
            server.wait_ready()
            assert support.snapshot(ledger) == before
            assert ledger.extend(MODEL, group.leases) == []
            assert ledger.complete(MODEL, job_id, "part", support.finished(group.leases)) == []
            group = support.group_of(ledger)
            ledger.complete(MODEL, job_id, "last", support.finished(group.leases))
            job = ledger.job(job_id)
            assert job is not None
            assert job.state == State.FINALIZING
    finally:
        server.server.stop()


def test_a_redis_that_lost_its_data_refuses_old_leases_and_takes_the_job_anew(ledger: Ledger) -> None:
    entered = support.record()
    job_id = support.job_of(ledger, support.requests(entered.id, 2))
    group = support.group_of(ledger)
    ledger.redis.flushall()
    assert ledger.complete(MODEL, job_id, "part", support.finished(group.leases)) == [0, 1]
    assert ledger.extend(MODEL, group.leases) == [lease.rid for lease in group.leases]
    unit = ledger.recover(support.record(job_id))
    assert unit is not None
    # The race: the worker of the job's former life hands in a part while recovery goes on. It is refused, and
    # recovery, which finds the part in the store, counts it.
    assert ledger.complete(MODEL, job_id, "part", support.finished(group.leases)) == [0, 1]
    unleased = [type(row)(**{**row.__dict__, "token": None}) for row in support.finished(group.leases)]
    assert ledger.complete(None, job_id, "part", unleased) == []
    ledger.release_unit(unit)
    support.plan(ledger, job_id, ["again"], total=2)
    ledger.feed(support.claimed(ledger, "feed"), "again", 0, support.requests(job_id, 2), last=True)
    job = ledger.job(job_id)
    assert job is not None
    assert (job.state, job.completed, job.fed) == (State.FINALIZING, 2, 0)
