"""Finished rows wait in memory until the store and Redis take them; then they count, once."""

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import store_faults
from jobs.ledger import Lease
from jobs.records import PlannedRequest, ResultRow
from jobs.settings import Settings
from jobs.store_local import LocalStore
from worker import flusher
from worker.held import Held


class CountingLedger:
    """A ledger that takes everything and remembers it."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def complete(self, fingerprint: str, job_id: str, part: str, rows: list[Any]) -> list[int]:
        self.rows += [row.row for row in rows]
        return []


def lease(row: int) -> Lease:
    request = PlannedRequest(
        id=f"j:{row}",
        job_id="j",
        row=row,
        custom_id=str(row),
        endpoint="/v1/completions",
        model="m",
        bucket=128,
        created_at=0,
        prompt_ids=[1],
        params={},
    )
    return Lease(request, "token", "m@0", 1, 0, 0.0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_disk_that_takes_nothing_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(flusher, "RETRY_SECONDS", 0.05)
    inner = LocalStore(tmp_path)
    faulty = store_faults.FaultyStore(inner, {"put": store_faults.FailTimes(5, OSError(code, "injected"))})
    ledger, held = CountingLedger(), Held()
    one = flusher.Flusher(Settings(flush_seconds=0.05), ledger, faulty, held, "m@0")  # type: ignore[arg-type]
    one.start()
    leases = [lease(row) for row in range(3)]
    held.add(leases)
    for each in leases:
        held.finish(each)
        one.put(flusher.Done(each, [ResultRow(each.request.row, False, {"error": None}, None)]))
    time.sleep(0.15)
    assert held.all() == leases
    assert ledger.rows == []
    one.close(5)
    assert sorted(ledger.rows) == [0, 1, 2]
    assert len(held) == 0
    parts = [inner.get(found.key) for found in inner.list("jobs/j/parts/")]
    assert sum(part.count(b"\n") for part in parts) == 3
    assert one.completed == 3


def test_rows_that_came_too_late_are_not_counted_as_finished(tmp_path: Path) -> None:
    class Refusing(CountingLedger):
        def complete(self, fingerprint: str, job_id: str, part: str, rows: list[Any]) -> list[int]:
            return [1]

    counted: list[tuple[list[int], list[Lease], int]] = []
    held = Held()
    one = flusher.Flusher(
        Settings(flush_seconds=0.05),
        Refusing(),  # type: ignore[arg-type]
        LocalStore(tmp_path),
        held,
        "m@0",
        on_counted=lambda rows, leases, refused: counted.append(([row.row for row in rows], leases, refused)),
    )
    leases = [lease(row) for row in range(3)]
    held.add(leases)
    for each in leases:
        held.finish(each)
        one.put(flusher.Done(each, [ResultRow(each.request.row, False, {"error": None}, None)]))
    one.start()
    one.close(5)
    assert counted == [([0, 2], leases, 1)]
