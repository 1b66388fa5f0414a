"""Requests: claimed, started, extended, released, completed, reaped, given up."""

import time
from collections.abc import Iterator

import pytest
import redis

from jobs import ids
from jobs.ledger import Finished, Ledger, State
from jobs.records import PartEntry
from tests.integration import ledger_support as support

MODEL = support.MODEL


@pytest.fixture
def ledger(redis_url: str) -> Iterator[Ledger]:
    with redis.Redis.from_url(redis_url) as client:
        yield Ledger(client, support.NAMESPACE, lease_seconds=3600)


@pytest.fixture
def other(ledger: Ledger) -> Ledger:
    """The ledger as another worker sees it."""
    return Ledger(ledger.redis, support.NAMESPACE, lease_seconds=3600)


def test_a_bucket_that_has_work_is_left_for_one_that_waits_far_longer(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = ids.batch_id()
    support.job_of(ledger, [support.request(job_id, 0, bucket=128)])
    time.sleep(0.05)
    later = ids.batch_id()
    support.job_of(ledger, [support.request(later, row, bucket=512) for row in range(3)])
    assert support.group_of(ledger, 1, prefer=512).bucket == 512
    monkeypatch.setattr("jobs.ledger._PATIENCE_MS", 20)
    assert support.group_of(ledger, 1, prefer=512).bucket == 128
    assert support.group_of(ledger, 1, prefer=128).bucket == 512


def given_up(ledger: Ledger, job_id: str) -> list[str]:
    """Let the only waiting request kill its worker until it is given up."""
    support.die_running(ledger, support.group_of(ledger, 1))
    ledger.reap([MODEL])
    for _ in range(2):
        group = support.group_of(ledger, idle=True)
        assert group.alone
        support.die_running(ledger, group)
        reaped = ledger.reap([MODEL])
    return [lease.rid for lease in reaped.given_up]


def test_a_group_comes_in_plan_order_with_all_that_is_needed_to_run_it(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 5)
    group = support.group_of(ledger, count=3)
    assert support.rows_of(group) == [0, 1, 2]
    assert (group.bucket, group.alone) == (128, False)
    assert group.leases[1].request.prompt_ids == support.request(job_id, 1).prompt_ids
    assert {lease.attempts for lease in group.leases} == {0}
    assert support.rows_of(support.group_of(ledger)) == [3, 4]
    assert ledger.claim(MODEL, 64) is None


@pytest.mark.parametrize("count", [0, -1])
def test_a_claim_of_nothing_gives_nothing(ledger: Ledger, count: int) -> None:
    support.job_of(ledger, 1)
    assert ledger.claim(MODEL, count) is None
    assert ledger.claim("unknown@1", 1) is None


def test_a_worker_stays_in_its_bucket_and_then_takes_the_one_that_waits_longest(ledger: Ledger) -> None:
    job_id = ids.batch_id()
    buckets = [1024, 128, 128, 512]
    support.job_of(ledger, [support.request(job_id, row, bucket) for row, bucket in enumerate(buckets)])
    assert support.rows_of(support.group_of(ledger, 1, prefer=128)) == [1]
    assert support.rows_of(support.group_of(ledger, 9, prefer=128)) == [2]
    # All were fed in one millisecond: the shorter bucket goes first.
    assert support.rows_of(support.group_of(ledger, 9, prefer=128)) == [3]
    assert support.rows_of(support.group_of(ledger, 9)) == [0]


def test_an_entry_left_by_a_finished_request_does_not_make_its_bucket_look_old(ledger: Ledger) -> None:
    first, second, third = (ids.batch_id() for _ in range(3))
    for job_id, bucket in ((first, 128), (second, 256), (third, 128)):
        support.job_of(ledger, [support.request(job_id, 0, bucket)])
        time.sleep(0.002)
    ledger.complete(None, first, "recovered", [Finished(f"{first}:0", None, 0, False)])
    groups = [support.group_of(ledger), support.group_of(ledger)]
    assert [group.leases[0].request.job_id for group in groups] == [second, third]


def test_a_request_with_two_entries_is_leased_once(ledger: Ledger) -> None:
    support.job_of(ledger, 1)
    queue = ledger._keys.name("queue", MODEL, 128, "default")
    ledger.redis.rpush(queue, ledger.redis.lrange(queue, 0, 0)[0])
    assert support.rows_of(support.group_of(ledger)) == [0]
    assert ledger.claim(MODEL, 9) is None


def test_a_group_never_mixes_buckets_but_mixes_jobs(ledger: Ledger) -> None:
    for _ in range(10):
        job_id = ids.batch_id()
        support.job_of(ledger, [support.request(job_id, 0, 128), support.request(job_id, 1, 256)])
    groups = [support.group_of(ledger), support.group_of(ledger)]
    assert [len(group.leases) for group in groups] == [10, 10]
    for group in groups:
        assert {lease.request.bucket for lease in group.leases} == {group.bucket}


def test_epochs_only_grow_even_when_redis_forgets_them(ledger: Ledger) -> None:
    support.job_of(ledger, 50)
    epochs = [support.group_of(ledger, 1).epoch for _ in range(49)]
    assert epochs == sorted(set(epochs))
    ledger.redis.delete(ledger._keys.name("epoch"))
    time.sleep(0.1)
    last = support.group_of(ledger, 1)
    assert last.epoch > epochs[-1]
    assert [lease.epoch for lease in last.leases] == [last.epoch]


def test_released_requests_return_to_the_head_in_their_order_without_an_attempt(ledger: Ledger) -> None:
    support.job_of(ledger, 5)
    group = support.group_of(ledger, 3)
    ledger.start(MODEL, group.leases)
    ledger.release(MODEL, group.leases)
    again = support.group_of(ledger)
    assert support.rows_of(again) == [0, 1, 2, 3, 4]
    assert {lease.attempts for lease in again.leases} == {0}
    assert [lease.enqueued for lease in again.leases[:3]] == [lease.enqueued for lease in group.leases]


def test_what_the_old_owner_does_after_a_release_changes_nothing(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 2)
    zombie = support.group_of(ledger)
    ledger.release(MODEL, zombie.leases)
    owner = support.group_of(ledger)
    before = support.snapshot(ledger)
    rids = [lease.rid for lease in zombie.leases]
    ledger.release(MODEL, zombie.leases)
    assert ledger.start(MODEL, zombie.leases) == rids
    assert ledger.extend(MODEL, zombie.leases) == rids
    assert ledger.complete(MODEL, job_id, "zombie", support.finished(zombie.leases)) == [0, 1]
    assert support.snapshot(ledger) == before
    assert ledger.complete(MODEL, job_id, "owner", support.finished(owner.leases)) == []
    assert ledger.parts(job_id) == [PartEntry("owner")]


def test_an_extended_lease_is_not_reaped(ledger: Ledger) -> None:
    support.job_of(ledger, 2)
    group = support.group_of(ledger)
    support.leases_run_out(ledger, group.leases)
    assert ledger.extend(MODEL, group.leases[:1]) == []
    assert ledger.reap().requeued == 1
    assert ledger.extend(MODEL, group.leases) == [group.leases[1].rid]


def test_waiting_requests_of_a_dead_worker_return_without_an_attempt(ledger: Ledger) -> None:
    support.job_of(ledger, 3)
    group = support.group_of(ledger, 2)
    support.leases_run_out(ledger, group.leases)
    assert ledger.reap([MODEL]).requeued == 2
    again = support.group_of(ledger)
    assert support.rows_of(again) == [0, 1, 2]
    assert {lease.attempts for lease in again.leases} == {0}


def test_running_requests_of_a_dead_worker_become_suspects_and_run_apart(ledger: Ledger) -> None:
    support.job_of(ledger, 4)
    group = support.group_of(ledger, 2)
    support.die_running(ledger, group)
    assert ledger.reap([MODEL]).requeued == 2
    assert ledger.depth().models[MODEL] == {"queued": 4, "leased": 0, "suspects": 2, "buckets": {128: 2}}
    together = support.group_of(ledger, idle=True)
    assert (support.rows_of(together), together.alone, together.bucket) == ([0, 1], True, 128)
    assert together.leases[0].attempts == 1
    assert support.rows_of(support.group_of(ledger)) == [2, 3]
    support.die_running(ledger, together)
    assert ledger.reap([MODEL]).requeued == 2
    for row in range(2):
        alone = support.group_of(ledger, idle=True)
        assert (support.rows_of(alone), alone.alone, alone.leases[0].attempts) == ([row], True, 2)


def test_many_suspects_of_two_deaths_run_in_eighths_before_they_run_alone(ledger: Ledger) -> None:
    support.job_of(ledger, 64)
    for _ in range(2):
        group = support.group_of(ledger, idle=True)
        assert len(group.leases) == 64
        support.die_running(ledger, group)
        ledger.reap([MODEL])
    eighth = support.group_of(ledger, idle=True)
    assert (len(eighth.leases), eighth.alone) == (8, True)
    support.die_running(ledger, eighth)
    ledger.reap([MODEL])
    sizes = [len(support.group_of(ledger, idle=True).leases) for _ in range(15)]
    assert sizes == [8] * 7 + [1] * 8


def test_suspects_of_two_buckets_are_not_mixed(ledger: Ledger) -> None:
    job_id = ids.batch_id()
    support.job_of(
        ledger, [support.request(job_id, row, bucket) for row, bucket in enumerate((128, 256, 256))]
    )
    for group in (support.group_of(ledger), support.group_of(ledger)):
        support.die_running(ledger, group)
    ledger.reap([MODEL])
    first, second = support.group_of(ledger, idle=True), support.group_of(ledger, idle=True)
    assert (first.bucket, support.rows_of(first)) == (128, [0])
    assert (second.bucket, support.rows_of(second), second.alone) == (256, [1, 2], True)


def test_suspects_that_are_released_go_on_together(ledger: Ledger) -> None:
    support.job_of(ledger, 4)
    support.die_running(ledger, support.group_of(ledger, 3))
    ledger.reap([MODEL])
    ledger.release(MODEL, support.group_of(ledger, 2, idle=True).leases)
    assert support.rows_of(support.group_of(ledger, idle=True)) == [0, 1, 2]


def test_while_suspects_wait_one_busy_worker_drains_and_the_others_go_on(
    ledger: Ledger, other: Ledger
) -> None:
    support.job_of(ledger, 6)
    support.die_running(ledger, support.group_of(ledger, 1))
    ledger.reap([MODEL])
    assert ledger.claim(MODEL, 1) is None
    assert ledger.claim(MODEL, 1) is None
    assert support.rows_of(support.group_of(other, 1)) == [1]
    assert support.group_of(ledger, 1, idle=True).alone
    assert not support.group_of(ledger, 1).alone


def test_a_suspect_that_finishes_is_an_ordinary_result(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 1)
    support.die_running(ledger, support.group_of(ledger))
    ledger.reap([MODEL])
    support.die_running(ledger, support.group_of(ledger, idle=True))
    ledger.reap([MODEL])
    group = support.group_of(ledger, idle=True)
    ledger.start(MODEL, group.leases)
    assert ledger.complete(MODEL, job_id, "part", support.finished(group.leases)) == []
    job = ledger.job(job_id)
    assert job is not None
    assert (job.state, job.completed) == (State.FINALIZING, 1)
    left = [name for name in support.snapshot(ledger) if MODEL in name]
    assert left == []


def test_a_suspect_that_is_released_or_never_started_stays_a_suspect_without_an_attempt(
    ledger: Ledger,
) -> None:
    support.job_of(ledger, 1)
    support.die_running(ledger, support.group_of(ledger))
    ledger.reap([MODEL])
    group = support.group_of(ledger, idle=True)
    ledger.start(MODEL, group.leases)
    ledger.release(MODEL, group.leases)
    group = support.group_of(ledger, idle=True)
    support.leases_run_out(ledger, group.leases)
    ledger.reap([MODEL])
    group = support.group_of(ledger, idle=True)
    assert (group.alone, group.leases[0].attempts) == (True, 1)


def test_a_request_that_kills_its_worker_alone_twice_is_given_up_and_its_neighbours_finish(
    ledger: Ledger,
) -> None:
    job_id = support.job_of(ledger, 2)
    assert given_up(ledger, job_id) == [f"{job_id}:0"]
    # The reaper died before it wrote the line: its lease runs out, and the next one gets the request, which
    # never runs again.
    leases = ledger.redis.zrange(ledger._keys.name("leases", MODEL), 0, -1)
    ledger.redis.zadd(ledger._keys.name("leases", MODEL), {leases[0]: 1})
    assert support.rows_of(support.group_of(ledger, idle=True)) == [1]
    reaped = ledger.reap([MODEL])
    assert (reaped.requeued, [lease.attempts for lease in reaped.given_up]) == (0, [3])
    assert ledger.complete(MODEL, job_id, "lost", support.finished(reaped.given_up, failed=True)) == []
    job = ledger.job(job_id)
    assert job is not None
    assert (job.failed, job.live) == (1, 1)


def test_a_request_given_up_that_is_released_is_handed_out_by_the_next_reap(ledger: Ledger) -> None:
    support.job_of(ledger, 1)
    support.die_running(ledger, support.group_of(ledger, 1))
    ledger.reap([MODEL])
    for _ in range(2):
        support.die_running(ledger, support.group_of(ledger, idle=True))
        reaped = ledger.reap([MODEL])
    ledger.release(MODEL, reaped.given_up)
    assert ledger.claim(MODEL, 9, idle=True) is None
    assert [lease.rid for lease in ledger.reap().given_up] == [lease.rid for lease in reaped.given_up]


def test_after_an_outage_workers_get_a_grace_to_extend_what_they_run(ledger: Ledger) -> None:
    support.job_of(ledger, 1)
    group = support.group_of(ledger)
    ledger.start(MODEL, group.leases)
    ledger.reap([MODEL])
    # The race: Redis was away for longer than a lease, and a reaper comes back before the heartbeat.
    reaped = ledger._keys.name("reaped", MODEL)
    ledger.redis.hincrby(reaped, "at", -ledger._gap_ms - 1000)
    support.leases_run_out(ledger, group.leases)
    assert ledger.reap([MODEL]).requeued == 0
    assert ledger.extend(MODEL, group.leases) == []
    ledger.redis.hset(reaped, "until", 0)
    assert ledger.reap([MODEL]).requeued == 0
    support.leases_run_out(ledger, group.leases)
    assert ledger.reap([MODEL]).requeued == 1


def test_a_reap_takes_back_more_than_one_script_does_at_once(ledger: Ledger) -> None:
    support.job_of(ledger, 2300)
    group = support.group_of(ledger, 2300)
    assert len(group.leases) == 2300
    support.leases_run_out(ledger, group.leases)
    assert ledger.reap([MODEL]).requeued == 2300
    assert ledger.depth().models[MODEL]["queued"] == 2300


def test_a_caller_that_knows_an_old_fingerprint_is_sent_to_the_new_one(ledger: Ledger) -> None:
    # The race: a plan under new weights comes between reading the job's fingerprint and the script.
    job_id = support.job_of(ledger, 3)
    row = Finished(f"{job_id}:0", None, 0, False)
    assert ledger.complete("old@1", job_id, "recovered", [row]) == []
    assert ledger.depth().models[MODEL]["queued"] == 2
    assert ledger._on_model("cancel", job_id, fingerprint="old@1") == b"cancelling"
    assert ledger.depth().models[MODEL]["queued"] == 0


def test_suspects_of_a_cancelled_job_drain_nobody(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 1)
    support.die_running(ledger, support.group_of(ledger, 1))
    ledger.reap([MODEL])
    support.job_of(ledger, 1)
    ledger.cancel(job_id)
    assert ledger.depth().models[MODEL]["suspects"] == 0
    assert not support.group_of(ledger).alone


def test_a_suspect_that_recovery_found_finished_drains_nobody(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 2)
    support.die_running(ledger, support.group_of(ledger, 1))
    ledger.reap([MODEL])
    ledger.complete(None, job_id, "recovered", [Finished(f"{job_id}:0", None, 0, False)])
    assert support.rows_of(support.group_of(ledger)) == [1]


def test_depth_counts_queued_and_leased_by_bucket(ledger: Ledger) -> None:
    job_id = ids.batch_id()
    support.job_of(
        ledger, [support.request(job_id, row, bucket) for row, bucket in enumerate((128, 128, 512))]
    )
    support.group_of(ledger, 1)
    depth = ledger.depth()
    assert depth.models == {MODEL: {"queued": 2, "leased": 1, "suspects": 0, "buckets": {128: 1, 512: 1}}}
    payloads = ledger.redis.hvals(ledger._keys.name("requests", MODEL))
    assert depth.fed_bytes == sum(map(len, payloads))
    ledger.cancel(job_id)
    assert ledger.depth().fed_bytes == 0


def test_a_lost_answer_to_a_claim_is_given_again_and_leases_nothing_twice(ledger: Ledger) -> None:
    support.job_of(ledger, 4)
    first = ledger.claim(MODEL, 2, token="mine")
    assert first is not None
    assert ledger.claim(MODEL, 2, token="mine") == first
    # The race: the retry comes when one of the group has been reaped and claimed by another.
    support.leases_run_out(ledger, first.leases[:1])
    ledger.reap([MODEL])
    support.group_of(ledger, 1)
    again = ledger.claim(MODEL, 2, token="mine")
    assert again is not None
    assert again.leases == first.leases[1:]
    assert ledger.depth().models[MODEL]["leased"] == 2


def test_a_claim_that_found_nothing_finds_nothing_when_it_is_repeated_late(ledger: Ledger) -> None:
    # The race: an old duplicate of an empty claim arrives when there is work; nobody waits for its answer.
    assert ledger.claim(MODEL, 2, token="mine") is None
    support.job_of(ledger, 1)
    assert ledger.claim(MODEL, 2, token="mine") is None
    assert support.rows_of(support.group_of(ledger)) == [0]
