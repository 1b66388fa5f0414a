"""The ledger with a million requests in it: what Redis takes, and how fast it hands them out.

A Redis of its own, with the append-only file on as everywhere. Requests go in by the calls that plan and feed
make, past the window and the budget of bytes that a deployment has (LONGHAUL_FEED_WINDOW_REQUESTS,
LONGHAUL_FEED_BUDGET_BYTES), which keep Redis far smaller. One client, one call at a time. Each figure is one
JSON line.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import redis

from jobs import ids
from jobs.embedded import RedisServer
from jobs.ledger import Finished, Ledger
from jobs.records import JobRecord, PlannedRequest

MODEL = "bench@1"
_SHARD = 512
_JOB = 50_000
_CLAIM = 64


@click.command()
@click.option("--requests", type=click.IntRange(min=_CLAIM), default=1_000_000, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--tenants", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--claims", type=click.IntRange(min=1), default=1000, show_default=True)
def main(requests: int, prompt_tokens: int, tenants: int, claims: int) -> None:
    """Fill a Redis with REQUESTS, then claim, extend and complete some of them."""
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-") as folder:
        server = RedisServer(Path(folder) / "redis", Path(folder) / "redis.log")
        try:
            server.wait_ready()
            with redis.Redis.from_url(server.url) as client:
                ledger = Ledger(client, "bench", 3600, feed_window_requests=_JOB, feed_budget_bytes=1 << 40)
                _fill(ledger, requests, prompt_tokens, tenants)
                _work(ledger, claims)
                _look(ledger)
        finally:
            server.server.stop()


def _fill(ledger: Ledger, requests: int, prompt_tokens: int, tenants: int) -> None:
    before, started = _memory(ledger), time.perf_counter()
    for number, first in enumerate(range(0, requests, _JOB)):
        _job(ledger, min(_JOB, requests - first), prompt_tokens, f"tenant-{number % tenants}")
    seconds = time.perf_counter() - started
    payload = len(_request(ids.batch_id(), 0, prompt_tokens, "tenant-0").to_json())
    took = _memory(ledger) - before
    _print(
        figure="fill",
        requests=requests,
        tenants=tenants,
        fed_per_second=round(requests / seconds),
        payload_bytes=payload,
        redis_bytes=took,
        redis_bytes_per_request=round(took / requests),
    )


def _job(ledger: Ledger, count: int, prompt_tokens: int, tenant: str) -> None:
    job_id, now = ids.batch_id(), time.time()
    record = JobRecord(
        job_id, tenant, "/v1/completions", "file-1", "files/1", "24h", created_at=now, expires_at=now + 86_400
    )
    ledger.create(record)
    unit = ledger.claim_unit("plan", job_id)
    assert unit is not None
    ledger.begin_plan(unit, count, "bench", MODEL)
    ledger.add_shards(unit, [f"{job_id}/shard"], count)
    ledger.end_plan(unit, count, count * prompt_tokens)
    unit = ledger.claim_unit("feed", job_id)
    assert unit is not None
    for first in range(0, count, _SHARD):
        last = min(first + _SHARD, count)
        some = [_request(job_id, row, prompt_tokens, tenant) for row in range(first, last)]
        assert ledger.feed(unit, f"{job_id}/shard", first, some, last=last == count)


def _request(job_id: str, row: int, prompt_tokens: int, tenant: str) -> PlannedRequest:
    return PlannedRequest(
        id=ids.request_id(job_id, row),
        job_id=job_id,
        row=row,
        custom_id=f"row-{row}",
        endpoint="/v1/completions",
        model="bench",
        bucket=(128, 512, 2048)[row % 3],
        created_at=1.0,
        prompt_ids=[(row * 31 + place) % 50_000 for place in range(prompt_tokens)],
        params={"max_tokens": 64, "temperature": 0.0},
        tenant=tenant,
    )


def _work(ledger: Ledger, claims: int) -> None:
    claimed, extended, completed, requests = [], [], [], 0
    for number in range(claims):
        started = time.perf_counter()
        group = ledger.claim(MODEL, _CLAIM)
        claimed.append(time.perf_counter() - started)
        assert group is not None
        requests += len(group.leases)
        extended.append(_timed(lambda: ledger.extend(MODEL, group.leases)))  # noqa: B023
        by_job: dict[str, list[Finished]] = {}
        for lease in group.leases:
            row = Finished(lease.rid, lease.token, lease.request.row, False, 64, 0, 64)
            by_job.setdefault(lease.request.job_id, []).append(row)
        for job_id, rows in by_job.items():
            completed.append(
                _timed(lambda: ledger.complete(MODEL, job_id, f"part-{number}-{job_id}", rows))  # noqa: B023
            )
    _print(
        figure="claim",
        claims=claims,
        claims_per_second=round(claims / sum(claimed), 1),
        requests_per_second=round(requests / sum(claimed)),
        **_milliseconds(claimed),
    )
    _print(figure="extend", requests=_CLAIM, **_milliseconds(extended))
    _print(
        figure="complete", requests_per_second=round(requests / sum(completed)), **_milliseconds(completed)
    )


def _look(ledger: Ledger) -> None:
    _print(
        figure="scaling_read",
        **_milliseconds([_timed(lambda: ledger.fleet.load([MODEL])) for _ in range(50)]),
    )
    _print(figure="depth", **_milliseconds([_timed(ledger.depth) for _ in range(50)]))
    _print(figure="reap", **_milliseconds([_timed(ledger.reap) for _ in range(50)]))


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"p50_ms": round(statistics.median(ordered) * 1e3, 3), "p99_ms": round(p99 * 1e3, 3)}


def _memory(ledger: Ledger) -> int:
    info: Any = ledger.redis.info("memory")
    return int(info["used_memory"])


def _print(**figure: Any) -> None:
    click.echo(json.dumps(figure))


if __name__ == "__main__":
    main()
