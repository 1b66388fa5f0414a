"""A round: a fault strikes a system with jobs in it; when they have ended, it is counted what that cost."""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from jobs.ids import request_id
from tests.chaos import leftovers
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import System

REPORT = "LONGHAUL_CHAOS_REPORT"
"""The file that gets a line for each round, from which `tests.chaos.table` makes docs/faults.md."""


@dataclass(frozen=True)
class Round:
    """What one round of a fault cost. `recomputed` rows were in flight; `seconds` from fault to recovery."""

    fault: str
    rows: int
    lost: int
    doubled: int
    recomputed: int
    seconds: float


class Watch:
    """Watches which rows the engines of a system compute, by the echo engine's fault `trace:FILE`."""

    def __init__(self, one: System, trace: Path) -> None:
        self._one, self._trace = one, trace
        self._in_flight: Counter[str] = Counter()
        self._struck = time.monotonic()

    def computed(self) -> Counter[str]:
        """Return how often the engines computed each request."""
        return Counter(self._trace.read_text().split()) if self._trace.exists() else Counter()

    def struck(self) -> None:
        """Note that a fault has just struck: what is computed but does not count may be computed again."""
        self._struck = time.monotonic()
        ids = set(self.computed())
        done: dict[str, bytes] = {}
        for name in ids:
            job_id, _, row = name.rpartition(":")
            bits = done.setdefault(job_id, self._one.ledger.done(job_id))
            if not _is_set(bits, int(row)) and self._one.ledger.job(job_id):
                self._in_flight[name] += 1

    def settle(self, fault: str, jobs: Mapping[str, Sequence[str]], recovered: float | None = None) -> Round:
        """Wait for the jobs (id -> custom_ids) to end; fail unless all is in order; report the round.

        `recovered` is when (monotonic) work went on; None: when the jobs had ended.
        """
        one = self._one
        lost = doubled = 0
        for job_id in jobs:
            one.finished(job_id, 120)
        ended = time.monotonic()
        for job_id, expected in jobs.items():
            output, failed = one.lines(job_id)
            found = Counter(line["custom_id"] for line in output + failed)
            lost += sum(name not in found for name in expected)
            doubled += sum(count - 1 for count in found.values())
            one.accounted(job_id, list(expected))
            self._counts(job_id, len(output), failed)
        recomputed = self._recomputed(jobs)
        try:
            wait_until(lambda: not self._left(), "nothing is left", 20)
        except AssertionError:
            raise AssertionError(f"left: {self._left()}") from None
        one.left_nothing()
        made = Round(
            fault,
            sum(map(len, jobs.values())),
            lost,
            doubled,
            recomputed,
            round((recovered or ended) - self._struck, 2),
        )
        record(made)
        return made

    def _counts(self, job_id: str, answered: int, failed: list[dict[str, object]]) -> None:
        counts = self._one.batch(job_id).request_counts
        ran = [line for line in failed if not _never_ran(line)]
        assert counts.total == answered + len(failed), counts
        assert (counts.completed, counts.failed) == (answered, len(ran)), counts

    def _recomputed(self, jobs: Mapping[str, Sequence[str]]) -> int:
        again = 0
        computed = self.computed()
        for job_id, expected in jobs.items():
            for row in range(len(expected)):
                name = request_id(job_id, row)
                extra = max(0, computed[name] - 1)
                assert extra <= self._in_flight[name], f"{name} was computed {computed[name]} times"
                again += extra
        return again

    def _left(self) -> list[str]:
        return leftovers.left(self._one.ledger, self._one.store, self._one.settings.namespace)


def record(made: Round) -> None:
    """Append a round to the report, if one is wanted."""
    if path := os.environ.get(REPORT):
        with open(path, "ab") as report:
            report.write(orjson.dumps(asdict(made)) + b"\n")


def _is_set(bits: bytes, row: int) -> bool:
    return len(bits) > row // 8 and bool(bits[row // 8] >> (7 - row % 8) & 1)


def _never_ran(line: dict[str, object]) -> bool:
    error = line["error"]
    return isinstance(error, dict) and error["code"] in ("batch_cancelled", "batch_expired")
