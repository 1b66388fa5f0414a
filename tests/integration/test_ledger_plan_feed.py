"""Planning and feeding: cursors, room, the end of the work, plans that start over, recovery."""

import time
from collections.abc import Iterator

import pytest
import redis

from jobs import errors, ids
from jobs.ledger import Finished, Ledger, State
from jobs.ledger_types import FeedState
from tests.integration import ledger_support as support

MODEL = support.MODEL


@pytest.fixture
def ledger(redis_url: str) -> Iterator[Ledger]:
    with redis.Redis.from_url(redis_url) as client:
        yield Ledger(client, support.NAMESPACE, lease_seconds=3600, feed_window_requests=4)


def state(ledger: Ledger, job_id: str) -> State:
    job = ledger.job(job_id)
    assert job is not None
    return job.state


def test_the_first_shards_put_the_job_in_progress_and_open_its_feed(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    assert ledger.claim_unit("feed") is None
    ledger.add_shards(unit, ["a", "b"], 4)
    assert state(ledger, unit.job_id) == State.IN_PROGRESS
    feeder = support.claimed(ledger, "feed")
    assert ledger.feed_state(feeder) == FeedState("a", 0, 4, 256_000_000, planned=False)


def test_shards_are_taken_from_a_plan_that_has_begun_under_this_lease_only(ledger: Ledger) -> None:
    dead = support.planning(ledger)
    ledger.add_shards(dead, ["1/a"], 4)
    support.unit_runs_out(ledger, dead)
    unit = support.claimed(ledger, "plan")
    with pytest.raises(errors.LeaseLost):
        ledger.add_shards(unit, ["2/a"], 4)
    with pytest.raises(errors.LeaseLost):
        ledger.end_plan(unit)


def test_feeding_moves_a_cursor_and_refuses_to_move_it_twice(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    ledger.add_shards(unit, ["a", "b"], 4)
    feeder = support.claimed(ledger, "feed")
    listed = support.requests(unit.job_id, 4)
    assert ledger.feed(feeder, "a", 0, listed[:1], last=False)
    assert ledger.feed_state(feeder).offset == 1
    # A retry of this very call is answered as before; another feeder at the same place is refused.
    assert ledger.feed(feeder, "a", 0, listed[:1], last=False)
    assert not ledger.feed(feeder, "a", 0, listed[:2], last=False)
    assert not ledger.feed(feeder, "b", 0, listed[:1], last=False)
    assert ledger.feed(feeder, "a", 1, listed[1:2], last=True)
    assert ledger.feed_state(feeder).shard == "b"
    assert ledger.feed(feeder, "b", 0, [], last=True)
    assert ledger.feed_state(feeder).shard is None
    assert state(ledger, unit.job_id) == State.IN_PROGRESS
    assert ledger.depth().models[MODEL]["queued"] == 2


def test_a_feed_without_requests_may_be_followed_by_one_with_some(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    ledger.add_shards(unit, ["a"], 4)
    feeder = support.claimed(ledger, "feed")
    assert ledger.feed(feeder, "a", 0, [], last=False)
    assert ledger.feed(feeder, "a", 0, support.requests(unit.job_id, 1), last=False)
    assert ledger.depth().models[MODEL]["queued"] == 1


def test_a_feeder_that_lost_its_unit_feeds_nothing(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    ledger.add_shards(unit, ["a"], 4)
    zombie = support.claimed(ledger, "feed")
    support.unit_runs_out(ledger, zombie)
    support.claimed(ledger, "feed")
    with pytest.raises(errors.LeaseLost):
        ledger.feed(zombie, "a", 0, support.requests(unit.job_id, 1), last=False)
    with pytest.raises(errors.LeaseLost):
        ledger.feed_state(zombie)
    assert ledger.depth().fed_bytes == 0


@pytest.mark.parametrize("change", [{"bucket": 100}, {"id": "batch_x:0"}])
def test_a_request_of_another_job_or_of_no_bucket_is_refused(
    ledger: Ledger, change: dict[str, object]
) -> None:
    unit = support.planning(ledger)
    ledger.add_shards(unit, ["a"], 4)
    wrong = support.request(unit.job_id, 0)
    wrong = type(wrong)(**{**wrong.__dict__, **change})
    with pytest.raises(ValueError, match="request"):
        ledger.feed(support.claimed(ledger, "feed"), "a", 0, [wrong], last=False)


def test_room_is_the_window_less_what_lives(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    ledger.add_shards(unit, ["a"], 8)
    feeder = support.claimed(ledger, "feed")
    ledger.feed(feeder, "a", 0, support.requests(unit.job_id, 3), last=False)
    assert ledger.feed_state(feeder).room_requests == 1
    group = support.group_of(ledger, 2)
    assert ledger.feed_state(feeder).room_requests == 1
    ledger.complete(MODEL, unit.job_id, "part", support.finished(group.leases))
    assert ledger.feed_state(feeder).room_requests == 3


def test_a_window_follows_how_fast_the_job_runs(ledger: Ledger) -> None:
    # What comes later waits behind all that is fed: a slow job must not fill Redis only because it may.
    ledger._window = 4096
    unit = support.planning(ledger, total=1000)
    ledger.add_shards(unit, ["a"], 1000)
    feeder = support.claimed(ledger, "feed")
    rows = support.requests(unit.job_id, 400)
    assert ledger.feed_state(feeder).room_requests == 128
    ledger.feed(feeder, "a", 0, rows[:128], last=False)
    assert ledger.feed_state(feeder).room_requests == 0
    ledger.complete(MODEL, unit.job_id, "one", support.finished(support.group_of(ledger, 64).leases))
    assert ledger.feed_state(feeder).room_requests == 256 - 64
    ledger.feed(feeder, "a", 128, rows[128:320], last=False)
    assert ledger.feed_state(feeder).room_requests == 0
    long_ago = str(int(time.time() * 1000) - 60_000)
    ledger.redis.hset(ledger._keys.name("job", unit.job_id), "filled", long_ago)
    ledger.complete(MODEL, unit.job_id, "two", support.finished(support.group_of(ledger, 200).leases))
    assert ledger.feed_state(feeder).room_requests == 128 - 56


def test_as_many_requests_wait_as_run_however_long_they_take(ledger: Ledger) -> None:
    # A window that counts what runs would leave the slots of a fleet empty.
    ledger._window = 1000
    unit = support.planning(ledger, total=2000)
    ledger.add_shards(unit, ["a"], 2000)
    feeder = support.claimed(ledger, "feed")
    rows, fed = support.requests(unit.job_id, 1000), 0
    for size in (128, 256, 512, 1000):
        assert ledger.feed_state(feeder).room_requests == size - fed
        ledger.feed(feeder, "a", fed, rows[fed:size], last=False)
        leased = 0
        while leased < size - fed:
            leased += len(support.group_of(ledger, size - fed - leased).leases)
        fed = size


def test_a_job_of_long_prompts_leaves_room_for_the_others(ledger: Ledger) -> None:
    size = len(support.request(ids.batch_id(), 0).to_json())
    ledger._budget = 4 * size
    big = support.planning(ledger)
    ledger.add_shards(big, ["a"], 8)
    feeder = support.claimed(ledger, "feed", big.job_id)
    ledger.feed(feeder, "a", 0, [support.request(big.job_id, 0)] * 1, last=False)
    assert ledger.feed_state(feeder).room_bytes == 3 * size
    small = support.planning(ledger)
    ledger.add_shards(small, ["b"], 1)
    assert ledger.feed_state(feeder).room_bytes == size
    assert ledger.feed_state(support.claimed(ledger, "feed", small.job_id)).room_bytes == 3 * size
    group = support.group_of(ledger)
    ledger.complete(MODEL, big.job_id, "part", support.finished(group.leases))
    assert ledger.feed_state(feeder).room_bytes == 4 * size


def test_a_feed_that_waits_is_due_at_once_when_the_window_is_half_empty(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    ledger.add_shards(unit, ["a"], 8)
    feeder = support.claimed(ledger, "feed")
    ledger.feed(feeder, "a", 0, support.requests(unit.job_id, 4), last=False)
    ledger.release_unit(feeder, delay_seconds=60)
    group = support.group_of(ledger)
    ledger.complete(MODEL, unit.job_id, "one", support.finished(group.leases[:1]))
    assert ledger.claim_unit("feed") is None
    ledger.complete(MODEL, unit.job_id, "two", support.finished(group.leases[1:2]))
    assert support.claimed(ledger, "feed").job_id == unit.job_id
    ledger.complete(MODEL, unit.job_id, "three", support.finished(group.leases[2:3]))
    assert ledger.claim_unit("feed") is None


def test_new_shards_make_a_waiting_feed_due(ledger: Ledger) -> None:
    unit = support.planning(ledger)
    ledger.add_shards(unit, ["a"], 1)
    feeder = support.claimed(ledger, "feed")
    ledger.feed(feeder, "a", 0, support.requests(unit.job_id, 1), last=True)
    ledger.release_unit(feeder, delay_seconds=60)
    ledger.add_shards(unit, ["b"], 1)
    assert ledger.feed_state(support.claimed(ledger, "feed")).shard == "b"


# The work of a job ends in whichever step comes last: each of these is one order of the same four events.


def test_the_end_is_seen_by_the_last_completion(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 2)
    group = support.group_of(ledger)
    ledger.complete(MODEL, job_id, "one", support.finished(group.leases[:1]))
    assert state(ledger, job_id) == State.IN_PROGRESS
    ledger.complete(MODEL, job_id, "two", support.finished(group.leases[1:]))
    assert state(ledger, job_id) == State.FINALIZING


def test_the_end_is_seen_by_the_end_of_the_plan(ledger: Ledger) -> None:
    unit = support.planning(ledger, total=1)
    ledger.add_shards(unit, ["a"], 1)
    feeder = support.claimed(ledger, "feed")
    ledger.feed(feeder, "a", 0, support.requests(unit.job_id, 1), last=True)
    ledger.complete(MODEL, unit.job_id, "part", support.finished(support.group_of(ledger).leases))
    assert state(ledger, unit.job_id) == State.IN_PROGRESS
    ledger.end_plan(unit)
    assert state(ledger, unit.job_id) == State.FINALIZING
    # The feeder that holds the unit still finds it gone.
    with pytest.raises(errors.LeaseLost):
        ledger.feed_state(feeder)
    assert ledger.depth().control == 1


def test_the_end_is_seen_by_a_feed_that_finds_every_row_done(ledger: Ledger) -> None:
    unit = support.planning(ledger, total=2)
    ledger.add_shards(unit, ["a"], 2)
    ledger.end_plan(unit)
    feeder = support.claimed(ledger, "feed")
    rows = [Finished(f"{unit.job_id}:{row}", None, row, False) for row in range(2)]
    ledger.complete(None, unit.job_id, "recovered", rows)
    assert state(ledger, unit.job_id) == State.IN_PROGRESS
    ledger.feed(feeder, "a", 0, support.requests(unit.job_id, 2), last=True)
    job = ledger.job(unit.job_id)
    assert job is not None
    assert (job.state, job.completed, job.fed) == (State.FINALIZING, 2, 0)


def test_the_end_is_seen_when_the_last_request_is_given_up(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 1)
    support.die_running(ledger, support.group_of(ledger))
    ledger.reap([MODEL])
    for _ in range(2):
        support.die_running(ledger, support.group_of(ledger, idle=True))
        reaped = ledger.reap([MODEL])
    assert state(ledger, job_id) == State.IN_PROGRESS
    ledger.complete(MODEL, job_id, "lost", support.finished(reaped.given_up, failed=True))
    assert state(ledger, job_id) == State.FINALIZING


def test_a_plan_that_starts_over_feeds_nothing_twice(ledger: Ledger) -> None:
    # The race: a planner is killed between two windows; what it released is being fed and run meanwhile.
    dead = support.planning(ledger, total=4)
    job_id = dead.job_id
    listed = support.requests(job_id, 4)
    ledger.add_shards(dead, ["1/a"], 2)
    feeder = support.claimed(ledger, "feed")
    ledger.feed(feeder, "1/a", 0, listed[:2], last=False)
    group = support.group_of(ledger, 1)
    ledger.complete(MODEL, job_id, "part", support.finished(group.leases))
    support.unit_runs_out(ledger, dead)
    unit = support.claimed(ledger, "plan")
    ledger.begin_plan(unit, 4, "tiny", MODEL)
    # The feeder still reads the old shard.
    assert not ledger.feed(feeder, "1/a", 2, listed[2:], last=True)
    assert ledger.feed_state(feeder).shard is None
    ledger.add_shards(unit, ["2/a", "2/b"], 4)
    ledger.end_plan(unit)
    assert ledger.feed(feeder, "2/a", 0, listed[:2], last=True)
    assert ledger.feed(feeder, "2/b", 0, listed[2:], last=True)
    job = ledger.job(job_id)
    assert job is not None
    assert (job.fed, job.live, job.completed) == (4, 3, 1)
    assert support.rows_of(support.group_of(ledger)) == [1, 2, 3]


def test_a_late_duplicate_of_begin_plan_does_not_drop_the_shards(ledger: Ledger) -> None:
    # The race: the client waited in vain for begin_plan, repeated it and went on; then the first one arrives.
    unit = support.planning(ledger)
    ledger.add_shards(unit, ["a"], 1)
    ledger.begin_plan(unit, 8, "tiny", MODEL)
    assert ledger.feed_state(support.claimed(ledger, "feed")).shard == "a"


def test_a_plan_under_new_weights_takes_back_what_was_fed_under_the_old(ledger: Ledger) -> None:
    dead = support.planning(ledger, total=2)
    listed = support.requests(dead.job_id, 2)
    ledger.add_shards(dead, ["1/a"], 2)
    feeder = support.claimed(ledger, "feed")
    ledger.feed(feeder, "1/a", 0, listed, last=True)
    old = support.group_of(ledger, 1)
    support.unit_runs_out(ledger, dead)
    unit = support.claimed(ledger, "plan")
    ledger.begin_plan(unit, 2, "tiny", "tiny@2")
    assert ledger.complete(MODEL, dead.job_id, "old", support.finished(old.leases)) == [0]
    ledger.add_shards(unit, ["2/a"], 2)
    ledger.end_plan(unit)
    ledger.feed(feeder, "2/a", 0, listed, last=True)
    assert ledger.claim(MODEL, 9) is None
    assert support.rows_of(support.group_of(ledger, fingerprint="tiny@2")) == [0, 1]
    assert ledger.depth().models[MODEL]["queued"] == 0


def test_recovery_restores_finished_rows_before_the_plan_runs_again(ledger: Ledger) -> None:
    entered = support.record()
    unit = ledger.recover(entered)
    assert unit is not None
    assert ledger.recover(entered) is None
    assert ledger.claim_unit() is None
    rows = [Finished(f"{entered.id}:{row}", None, row, row == 2, 3, 2, 2, 1) for row in (0, 2, 3)]
    assert ledger.complete(None, entered.id, "old", rows) == []
    # A zombie's part has row 0 too: it counts once, and the merge will pass it over.
    assert ledger.complete(None, entered.id, "zombie", rows[:1]) == [0]
    ledger.release_unit(unit)
    support.plan(ledger, entered.id, ["a"], total=4)
    ledger.feed(support.claimed(ledger, "feed"), "a", 0, support.requests(entered.id, 4), last=True)
    group = support.group_of(ledger)
    assert support.rows_of(group) == [1]
    ledger.complete(MODEL, entered.id, "new", support.finished(group.leases))
    job = ledger.job(entered.id)
    assert job is not None
    assert (job.state, job.completed, job.failed, job.usage) == (State.FINALIZING, 3, 1, (12, 8, 8, 4))


def test_a_request_with_one_follower_undone_is_fed_again(ledger: Ledger) -> None:
    entered = support.record()
    unit = ledger.recover(entered)
    assert unit is not None
    ledger.complete(None, entered.id, "old", [Finished(f"{entered.id}:0", None, 0, False)])
    ledger.release_unit(unit)
    support.plan(ledger, entered.id, ["a"], total=2)
    leader = support.request(entered.id, 0, followers=[1])
    ledger.feed(support.claimed(ledger, "feed"), "a", 0, [leader], last=True)
    group = support.group_of(ledger)
    assert ledger.complete(MODEL, entered.id, "new", support.finished(group.leases)) == [0]
    assert state(ledger, entered.id) == State.FINALIZING


def test_a_recovered_job_past_its_deadline_keeps_its_finished_rows(ledger: Ledger) -> None:
    # The race: a reaper sees the recovered job, long past its deadline, before its parts are in.
    entered = support.record(seconds=-5)
    unit = ledger.recover(entered)
    assert unit is not None
    assert ledger.expire_due() == []
    ledger.complete(None, entered.id, "old", [Finished(f"{entered.id}:0", None, 0, False)])
    ledger.release_unit(unit)
    assert ledger.expire_due() == [entered.id]
    assert [part.name for part in ledger.parts(entered.id)] == ["old"]


def test_a_job_cancelled_during_its_recovery_finalizes_when_its_parts_are_in(ledger: Ledger) -> None:
    entered = support.record()
    unit = ledger.recover(entered)
    assert unit is not None
    assert ledger.cancel(entered.id) == State.CANCELLING
    assert ledger.claim_unit() is None
    assert not ledger.extend_unit(unit)
    assert ledger.complete(None, entered.id, "old", [Finished(f"{entered.id}:0", None, 0, False)]) == []
    ledger.release_unit(unit)
    assert support.claimed(ledger, "finalize").job_id == entered.id


def test_a_recovery_that_dies_leaves_the_job_to_the_plan(ledger: Ledger) -> None:
    entered = support.record(seconds=-5)
    unit = ledger.recover(entered)
    assert unit is not None
    support.unit_runs_out(ledger, unit)
    assert ledger.expire_due() == [entered.id]
    assert support.claimed(ledger, "finalize").job_id == entered.id
