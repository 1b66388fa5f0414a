"""States, counts and times of jobs, from creation to the manifest."""

import time
from collections.abc import Iterator

import pytest
import redis

from jobs import errors, ids, settings
from jobs.ledger import Depth, Finished, Ledger, State
from tests.integration import ledger_support as support


@pytest.fixture
def ledger(redis_url: str) -> Iterator[Ledger]:
    with redis.Redis.from_url(redis_url) as client:
        yield Ledger(client, support.NAMESPACE, lease_seconds=3600)


def state(ledger: Ledger, job_id: str) -> State:
    job = ledger.job(job_id)
    assert job is not None
    return job.state


def test_a_job_unknown_to_redis_is_none(ledger: Ledger) -> None:
    known = support.record()
    ledger.create(known)
    assert ledger.job(ids.batch_id()) is None
    assert ledger.cancel(ids.batch_id()) is None
    found = ledger.jobs([ids.batch_id(), known.id])
    assert found[0] is None
    assert found[1] is not None
    assert ledger.jobs([]) == []


def test_a_loss_of_all_while_jobs_are_recovered_shows(ledger: Ledger) -> None:
    run = ledger.redis_run()
    assert ledger.redis_run() == run
    ledger.redis.flushall()
    ledger.note_recovered(run)  # of what was lost since
    assert ledger.recovered_run() != ledger.redis_run()


def test_created_twice_is_there_once(ledger: Ledger) -> None:
    entered = support.record()
    assert ledger.create(entered)
    assert not ledger.create(entered)
    job = ledger.job(entered.id)
    assert job is not None
    assert (job.state, job.times, job.expires_at) == (
        State.VALIDATING,
        {"created_at": entered.created_at},
        entered.expires_at,
    )
    assert ledger.depth().control == 1


def test_a_job_goes_through_its_states_and_is_counted(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 3)
    assert state(ledger, job_id) == State.IN_PROGRESS
    group = support.group_of(ledger)
    rows = support.finished(group.leases[:2]) + support.finished(group.leases[2:], failed=True)
    assert ledger.complete(support.MODEL, job_id, "part", rows) == []
    job = ledger.job(job_id)
    assert job is not None
    assert (job.state, job.outcome) == (State.FINALIZING, "completed")
    assert (job.total, job.completed, job.failed, job.usage) == (3, 2, 1, (9, 6, 6, 3))
    assert (job.planned, job.fed, job.live, job.model, job.fingerprint) == (True, 3, 0, "tiny", support.MODEL)
    support.finish(ledger, job_id)
    assert state(ledger, job_id) == State.COMPLETED
    assert ledger.depth().control == 0


def test_times_never_decrease_even_when_the_api_host_is_ahead_of_redis(ledger: Ledger) -> None:
    ahead = support.record()
    ahead = type(ahead)(**{**ahead.__dict__, "created_at": time.time() + 100})
    ledger.create(ahead)
    support.plan(ledger, ahead.id, [], total=0)
    job = ledger.job(ahead.id)
    assert job is not None
    stamps = [job.times[name] for name in ("created_at", "in_progress_at", "finalizing_at")]
    assert stamps == sorted(stamps)


def test_a_plan_that_refused_every_line_goes_to_finalizing(ledger: Ledger) -> None:
    entered = support.record()
    ledger.create(entered)
    unit = support.claimed(ledger, "plan")
    ledger.begin_plan(unit, 2, "tiny", support.MODEL)
    refused = [Finished(f"{entered.id}:{row}", None, row, failed=True) for row in range(2)]
    assert ledger.complete(None, entered.id, "part", refused) == []
    assert state(ledger, entered.id) == State.VALIDATING
    ledger.end_plan(unit)
    job = ledger.job(entered.id)
    assert job is not None
    assert (job.state, job.failed) == (State.FINALIZING, 2)
    assert {"in_progress_at", "finalizing_at"} <= job.times.keys()
    assert support.claimed(ledger, "finalize").job_id == entered.id


def test_a_wrong_file_fails_the_job_with_the_times_of_its_manifest(ledger: Ledger) -> None:
    entered = support.record()
    ledger.create(entered)
    ledger.fail(support.claimed(ledger, "plan"), support.manifest(entered.id, "failed", failed_at=7.0))
    job = ledger.job(entered.id)
    assert job is not None
    assert (job.state, job.times["failed_at"]) == (State.FAILED, 7.0)
    assert ledger.claim_unit() is None
    assert ledger.cancel(entered.id) == State.FAILED


def test_a_job_in_progress_cannot_fail(ledger: Ledger) -> None:
    entered = support.record()
    ledger.create(entered)
    unit = support.claimed(ledger, "plan")
    ledger.begin_plan(unit, 1, "tiny", support.MODEL)
    ledger.add_shards(unit, ["shard"], 1)
    with pytest.raises(errors.Conflict, match="in_progress"):
        ledger.fail(unit)


def test_cancel_takes_back_what_is_queued_and_what_is_leased(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 4)
    other = support.job_of(ledger, 2)
    group = support.group_of(ledger, count=2)
    assert ledger.cancel(job_id) == State.CANCELLING
    assert ledger.cancel(job_id) == State.CANCELLING
    assert ledger.extend(support.MODEL, group.leases) == [lease.rid for lease in group.leases]
    # The race: the worker had finished these when the cancellation came. They end as batch_cancelled.
    assert ledger.complete(support.MODEL, job_id, "part", support.finished(group.leases)) == [0, 1]
    depth = ledger.depth()
    assert depth.models[support.MODEL] == {"queued": 2, "leased": 0, "suspects": 0, "buckets": {128: 2}}
    assert {lease.request.job_id for lease in support.group_of(ledger).leases} == {other}
    support.finish(ledger, job_id, "cancelled")
    assert state(ledger, job_id) == State.CANCELLED
    assert ledger.cancel(job_id) == State.CANCELLED


def test_cancel_while_planning_takes_the_unit_from_the_planner(ledger: Ledger) -> None:
    entered = support.record()
    ledger.create(entered)
    unit = support.claimed(ledger, "plan")
    ledger.begin_plan(unit, 1, "tiny", support.MODEL)
    ledger.cancel(entered.id)
    with pytest.raises(errors.LeaseLost):
        ledger.add_shards(unit, ["shard"], 1)
    with pytest.raises(errors.LeaseLost):
        ledger.end_plan(unit)
    with pytest.raises(errors.LeaseLost):
        ledger.fail(unit)
    assert not ledger.extend_unit(unit)


def test_a_job_that_is_finalizing_is_neither_cancelled_nor_expired(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 1)
    ledger.complete(support.MODEL, job_id, "part", support.finished(support.group_of(ledger).leases))
    support.deadline_passes(ledger, job_id)
    assert ledger.expire_due() == []
    assert ledger.cancel(job_id) == State.FINALIZING
    job = ledger.job(job_id)
    assert job is not None
    assert job.outcome == "completed"


def test_a_job_past_its_deadline_keeps_what_is_finished_and_takes_back_the_rest(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 4)
    group = support.group_of(ledger, count=2)
    ledger.complete(support.MODEL, job_id, "part", support.finished(group.leases[:1]))
    assert ledger.expire_due() == []
    support.deadline_passes(ledger, job_id)
    assert ledger.expire_due() == [job_id]
    assert ledger.expire_due() == []
    job = ledger.job(job_id)
    assert job is not None
    assert (job.state, job.outcome, job.completed, job.live) == (State.FINALIZING, "expired", 1, 0)
    assert [part.name for part in ledger.parts(job_id)] == ["part"]
    assert ledger.start(support.MODEL, group.leases[1:]) == [group.leases[1].rid]
    support.finish(ledger, job_id, "expired")
    assert state(ledger, job_id) == State.EXPIRED


def test_a_cancelling_job_does_not_expire(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 1)
    ledger.cancel(job_id)
    support.deadline_passes(ledger, job_id)
    assert ledger.expire_due() == []
    assert state(ledger, job_id) == State.CANCELLING


def test_a_validating_job_expires_too(ledger: Ledger) -> None:
    entered = support.record(seconds=-1)
    ledger.create(entered)
    assert ledger.expire_due() == [entered.id]
    assert ledger.claim_unit("plan") is None
    assert support.claimed(ledger, "finalize").job_id == entered.id


def test_finish_drops_all_but_the_job_itself_which_is_forgotten_later(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 1)
    ledger.complete(support.MODEL, job_id, "part", support.finished(support.group_of(ledger).leases))
    unit = support.claimed(ledger, "finalize")
    ledger.finish(unit, support.manifest(job_id, completed_at=9.0))
    ledger.finish(unit, support.manifest(job_id, completed_at=9.0))
    job = ledger.job(job_id)
    assert job is not None
    assert (job.completed, job.failed, job.usage, job.times["completed_at"]) == (2, 1, (6, 4, 2, 1), 9.0)
    left = {name for name in support.snapshot(ledger) if job_id in name}
    assert left == {f"job:{job_id}"}
    assert 0 < ledger.redis.ttl(ledger._keys.name("job", job_id)) <= 3600
    assert ledger.parts(job_id) == []


def test_a_finalizer_that_lost_its_unit_ends_nothing(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 1)
    ledger.complete(support.MODEL, job_id, "part", support.finished(support.group_of(ledger).leases))
    first = support.claimed(ledger, "finalize")
    support.unit_runs_out(ledger, first)
    second = support.claimed(ledger, "finalize")
    with pytest.raises(errors.LeaseLost):
        ledger.finish(first, support.manifest(job_id))
    ledger.finish(second, support.manifest(job_id))
    # The race: the first one wrote the manifest after all. Its finish finds the job ended.
    ledger.finish(first, support.manifest(job_id))
    assert state(ledger, job_id) == State.COMPLETED


def test_the_manifest_decides_when_another_was_written_first(ledger: Ledger) -> None:
    # The race: a finalizer wrote `completed`, then Redis lost all, and the recovered job was cancelled.
    entered = support.record()
    ledger.create(entered)
    ledger.cancel(entered.id)
    support.finish(ledger, entered.id, "completed")
    assert state(ledger, entered.id) == State.COMPLETED


def test_a_manifest_cannot_end_a_job_in_an_unfinished_state(ledger: Ledger) -> None:
    entered = support.record()
    ledger.create(entered)
    ledger.cancel(entered.id)
    with pytest.raises(errors.Conflict):
        support.finish(ledger, entered.id, "in_progress")


def test_redis_that_is_not_there_is_one_clear_error_without_the_password(free_port: int) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port}/0"
    with pytest.raises(errors.RedisUnreachable, match="LONGHAUL_REDIS_URL") as raised:
        Ledger.connect(settings.Settings(redis_url=url))
    assert "secret" not in str(raised.value)
    assert str(free_port) in str(raised.value)


def test_connect_takes_the_settings(redis_url: str) -> None:
    connected = Ledger.connect(settings.Settings(redis_url=redis_url, namespace="other"))
    connected.create(support.record())
    assert connected.depth().control == 1
    assert connected.depth() == Depth({}, 1, 0)
    connected.close()
