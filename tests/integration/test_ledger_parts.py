"""Parts and the rows they make count: once each, from the owner of the lease or without one."""

from collections.abc import Iterator

import pytest
import redis

from jobs import ids
from jobs.ledger import Finished, Ledger
from jobs.records import PartEntry
from tests.integration import ledger_support as support

MODEL = support.MODEL


@pytest.fixture
def ledger(redis_url: str) -> Iterator[Ledger]:
    with redis.Redis.from_url(redis_url) as client:
        yield Ledger(client, support.NAMESPACE, lease_seconds=3600)


def test_the_same_part_again_gives_the_same_answer_and_counts_nothing(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 3)
    group = support.group_of(ledger)
    ledger.complete(None, job_id, "elsewhere", [Finished(f"{job_id}:1", None, 1, False)])
    assert ledger.complete(MODEL, job_id, "part", support.finished(group.leases)) == [1]
    before = support.snapshot(ledger)
    assert ledger.complete(MODEL, job_id, "part", support.finished(group.leases)) == [1]
    assert support.snapshot(ledger) == before
    assert ledger.parts(job_id) == [PartEntry("elsewhere"), PartEntry("part", [1])]
    assert ledger.parts(job_id, start=1) == [PartEntry("part", [1])]


def test_a_part_name_may_hold_any_text(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 1)
    name = 'jobs/é"\\/\n.jsonl'
    ledger.complete(MODEL, job_id, name, support.finished(support.group_of(ledger).leases))
    assert ledger.parts(job_id) == [PartEntry(name)]


def test_leader_and_followers_count_together_and_leave_together(ledger: Ledger) -> None:
    job_id = ids.batch_id()
    support.job_of(ledger, [support.request(job_id, 0, followers=[2, 3]), support.request(job_id, 1)])
    group = support.group_of(ledger)
    zombie = [Finished(f"{job_id}:0", "another", row, False) for row in (0, 2, 3)]
    assert ledger.complete(MODEL, job_id, "zombie", zombie) == [0, 2, 3]
    rows = support.finished(group.leases[:1])
    assert [row.row for row in rows] == [0, 2, 3]
    assert ledger.complete(MODEL, job_id, "part", rows) == []
    job = ledger.job(job_id)
    assert job is not None
    assert (job.completed, job.live) == (3, 1)


def test_a_row_beyond_the_total_is_refused(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 2)
    beyond = Finished(f"{job_id}:2", None, 2, False)
    assert ledger.complete(None, job_id, "part", [beyond]) == [2]
    assert ledger.parts(job_id) == []


def test_rows_that_never_ran_count_neither_as_completed_nor_as_failed(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 2)
    ledger.cancel(job_id)
    rows = [Finished(f"{job_id}:{row}", None, row, failed=None) for row in range(2)]
    assert ledger.complete(None, job_id, "cancelled", rows) == []
    job = ledger.job(job_id)
    assert job is not None
    assert (job.completed, job.failed) == (0, 0)
    assert ledger.done(job_id) == b"\xc0"


def test_an_unknown_or_ended_job_refuses_every_row(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 1)
    rows = support.finished(support.group_of(ledger).leases)
    assert ledger.complete(MODEL, ids.batch_id(), "part", rows) == [0]
    ledger.cancel(job_id)
    support.finish(ledger, job_id, "cancelled")
    assert ledger.complete(MODEL, job_id, "part", rows) == [0]
    assert ledger.complete(None, job_id, "part", [Finished(f"{job_id}:0", None, 0, False)]) == [0]
    assert [name for name in support.snapshot(ledger) if "part" in name or "done" in name] == []


def test_rows_without_a_token_finish_a_request_that_is_queued_or_leased(ledger: Ledger) -> None:
    job_id = support.job_of(ledger, 3)
    group = support.group_of(ledger, 1)
    rows = [Finished(f"{job_id}:{row}", None, row, False) for row in (0, 1)]
    assert ledger.complete(None, job_id, "recovered", rows) == []
    assert ledger.extend(MODEL, group.leases) == [f"{job_id}:0"]
    # Row 1 still has an entry in its queue, which is passed over.
    assert support.rows_of(support.group_of(ledger)) == [2]
    depth = ledger.depth().models[MODEL]
    assert (depth["queued"], depth["leased"]) == (0, 1)
