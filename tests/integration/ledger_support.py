"""What the ledger's tests share: jobs to enter, clocks to move, and clients that repeat themselves."""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from jobs import errors, ids
from jobs.ledger import Finished, Group, Lease, Ledger, Unit
from jobs.ledger_scripts import Argument, OtherModel, Scripts
from jobs.records import JobRecord, Manifest, PlannedRequest

MODEL = "tiny@1"
NAMESPACE = "ledger-test"


def record(
    job_id: str | None = None, *, priority: int = 0, seconds: float = 86400, tenant: str = "default"
) -> JobRecord:
    now = time.time()
    return JobRecord(
        id=job_id or ids.batch_id(),
        tenant=tenant,
        endpoint="/v1/chat/completions",
        input_file_id="file-1",
        input_key="files/1",
        completion_window="24h",
        created_at=now,
        expires_at=now + seconds,
        priority=priority,
    )


def request(job_id: str, row: int, bucket: int = 128, followers: Sequence[int] = ()) -> PlannedRequest:
    return PlannedRequest(
        id=ids.request_id(job_id, row),
        job_id=job_id,
        row=row,
        custom_id=f"custom-{row}",
        endpoint="/v1/chat/completions",
        model="tiny",
        bucket=bucket,
        created_at=1.0,
        prompt_ids=list(range(row + 3)),
        params={"max_tokens": 4},
        followers=[(follower, f"custom-{follower}") for follower in followers],
    )


def requests(job_id: str, count: int, bucket: int = 128) -> list[PlannedRequest]:
    return [request(job_id, row, bucket) for row in range(count)]


def plan(ledger: Ledger, job_id: str, shards: Sequence[str], total: int, fingerprint: str = MODEL) -> None:
    """Claim the plan unit and run it to its end."""
    unit = claimed(ledger, "plan", job_id)
    ledger.begin_plan(unit, total, "tiny", fingerprint)
    ledger.add_shards(unit, shards, total)
    ledger.end_plan(unit)


def planning(ledger: Ledger, total: int = 8) -> Unit:
    """Create a job and begin its plan; return the plan unit."""
    entered = record()
    ledger.create(entered)
    unit = claimed(ledger, "plan", entered.id)
    ledger.begin_plan(unit, total, "tiny", MODEL)
    return unit


def claimed(ledger: Ledger, kind: str, job_id: str | None = None) -> Unit:
    unit = ledger.claim_unit(kind, job_id)
    assert unit is not None
    return unit


def job_of(ledger: Ledger, planned: int | list[PlannedRequest], fingerprint: str = MODEL) -> str:
    """Create a job, plan it in one shard and feed all of it; return its id."""
    entered = record()
    listed = requests(entered.id, planned) if isinstance(planned, int) else planned
    if listed:
        entered = record(listed[0].job_id)
    assert ledger.create(entered)
    shard = f"{entered.id}/shard"
    plan(ledger, entered.id, [shard], sum(len(item.rows) for item in listed), fingerprint)
    assert ledger.feed(claimed(ledger, "feed", entered.id), shard, 0, listed, last=True)
    return entered.id


def group_of(
    ledger: Ledger, count: int = 64, fingerprint: str = MODEL, prefer: int | None = None, idle: bool = False
) -> Group:
    group = ledger.claim(fingerprint, count, prefer, idle)
    assert group is not None
    return group


def rows_of(group: Group) -> list[int]:
    return [lease.request.row for lease in group.leases]


def finished(leases: Sequence[Lease], failed: bool | None = False) -> list[Finished]:
    return [
        Finished(lease.rid, lease.token, row, failed, prompt=3, cached=2, completion=2, reasoning=1)
        for lease in leases
        for row in lease.request.rows
    ]


def manifest(job_id: str, state: str = "completed", **times: float) -> Manifest:
    return Manifest(
        job_id, state, "tiny", times, total=3, completed=2, failed=1, usage=(6, 4, 2, 1), files={}
    )


def finish(ledger: Ledger, job_id: str, state: str = "completed") -> None:
    ledger.finish(claimed(ledger, "finalize", job_id), manifest(job_id, state))


def leases_run_out(ledger: Ledger, leases: Sequence[Lease]) -> None:
    """Let the time of these leases pass."""
    for lease in leases:
        key = ledger._keys.name("leases", lease.fingerprint)
        ledger.redis.zadd(key, {lease.rid: 1}, xx=True)


def unit_runs_out(ledger: Ledger, unit: Unit) -> None:
    ledger.redis.zadd(ledger._keys.name("later"), {f"{unit.kind}:{unit.job_id}": 1}, xx=True)


def deadline_passes(ledger: Ledger, job_id: str) -> None:
    ledger.redis.hset(ledger._keys.name("job", job_id), "expires_at", 1)
    ledger.redis.zadd(ledger._keys.name("deadlines"), {job_id: 1}, xx=True)


def die_running(ledger: Ledger, group: Group) -> None:
    """A worker starts a group and is killed."""
    assert ledger.start(MODEL, group.leases) == []
    leases_run_out(ledger, group.leases)


class RunTwice(Scripts):
    """A client whose every answer gets lost once: each script runs again, and must answer the same.

    `log` keeps the calls, so that a test may let one arrive late.
    """

    def __init__(self, ledger: Ledger, twice: bool = True) -> None:
        super().__init__(ledger.redis)
        self.twice = twice
        self.log: list[tuple[str, Sequence[str], tuple[Argument, ...]]] = []

    def run(self, name: str, keys: Sequence[str], *args: Argument) -> Any:
        self.log.append((name, keys, args))
        answer = super().run(name, keys, *args)
        if self.twice:
            again = super().run(name, keys, *args)
            assert again == answer, name
        return answer

    def replay(self, call: int) -> None:
        """Run a call once more, now."""
        name, keys, args = self.log[call]
        with contextlib.suppress(errors.LeaseLost, errors.Conflict, OtherModel):
            super().run(name, keys, *args)


def repeating(ledger: Ledger, twice: bool = True) -> RunTwice:
    """Make this ledger's client repeat every script; returns it."""
    scripts = RunTwice(ledger, twice)
    ledger._scripts = scripts
    return scripts


def snapshot(ledger: Ledger) -> dict[str, Any]:
    """Return all that lies in Redis, without what only says when: the scores of leases, delays and reaps."""
    client, found = ledger.redis, {}
    for key in client.scan_iter("{" + NAMESPACE + "}:*"):
        name = key.decode().partition(":")[2]
        kind = client.type(key)
        if name.startswith(("claims:", "reaped:")) or name == "epoch":
            continue
        if kind == b"hash":
            found[name] = client.hgetall(key)
        elif kind == b"list":
            found[name] = client.lrange(key, 0, -1)
        elif kind == b"set":
            found[name] = client.smembers(key)
        elif kind == b"string":
            found[name] = client.get(key)
        else:
            timed = name == "later" or name.startswith("leases:")
            found[name] = {member: 0 if timed else score for member, score in client.zscan_iter(key)}
    return found
