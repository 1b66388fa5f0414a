"""A round: a fault strikes a system with jobs in it; when they have ended, it is counted what that cost."""

import os
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import redis

from jobs.ids import request_id
from jobs.ledger import State
from tests.chaos import leftovers
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import System

REPORT = "LONGHAUL_CHAOS_REPORT"
"""The file that gets a line for each round, from which `tests.chaos.table` makes docs/faults.md."""


_STEPS = {State.VALIDATING, State.FINALIZING, State.CANCELLING}


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
        self.in_work: set[str] = set()
        self._in_step: dict[str, State] = {}
        self._clock = time.monotonic()

    def computed(self) -> Counter[str]:
        """Return how often the engines computed each request."""
        return Counter(self._trace.read_text().split()) if self._trace.exists() else Counter()

    def leased(self) -> set[str]:
        """Return the ids of the requests that a worker holds."""
        ledger, prefix = self._one.ledger, f"{{{self._one.settings.namespace}}}:leases:"
        found: set[str] = set()
        for name in self._one.settings.fingerprints.values():
            members: Any = ledger.redis.zrange(prefix + name, 0, -1)
            found.update(member.decode() for member in members)
        return found

    def done(self, names: Iterable[str]) -> bool:
        """Whether all these requests have results, or their jobs have ended."""
        names = set(names)
        open_jobs = {name.rpartition(":")[0] for name in names}
        open_jobs = {job_id for job_id in open_jobs if not self._ended(job_id)}
        done = {job_id: self._one.ledger.done(job_id) for job_id in open_jobs}
        return all(_is_set(name, done) for name in names if _belongs(name, done))

    def struck(self, lives_on: bool = False) -> None:
        """Note that a fault strikes now: what is computed but does not count may be computed again.

        `lives_on`: who holds requests is not dead, so what it holds now may come to be computed twice too.
        """
        leased = self.leased()
        open_jobs = self._one.ledger.unfinished()
        done = {job_id: self._one.ledger.done(job_id) for job_id in open_jobs}
        undone = {name for name in self.computed() if _belongs(name, done) and not _is_set(name, done)}
        self._in_flight.update(undone | leased if lives_on else undone)
        self.in_work = undone | leased
        states = {job.id: job.state for job in self._one.ledger.jobs(open_jobs) if job}
        self._in_step = {job_id: state for job_id, state in states.items() if state in _STEPS}
        self._clock = time.monotonic()

    def over(self) -> None:
        """Note that the fault itself ended only now: seconds to recover count from here."""
        self._clock = time.monotonic()

    def settle(self, fault: str, jobs: Mapping[str, Sequence[str]], recovered: float | None = None) -> Round:
        """Wait for the jobs (id -> custom_ids) to end; report the round; fail unless all is in order.

        `recovered` is when (monotonic) work went on. None: when all that was in work at the fault was done,
        and each job that was being planned or finalized then had left that state.
        """
        one = self._one
        try:
            wait_until(self._went_on, "work goes on", 60)
        except AssertionError:
            raise AssertionError(self._stuck()) from None
        went_on = time.monotonic()
        for job_id in jobs:
            one.finished(job_id, 120)
        rows = sum(map(len, jobs.values()))
        seconds = round(max(0.0, (recovered or went_on) - self._clock), 2)
        made = Round(fault, rows, *self._lost_and_doubled(jobs), self._recomputed(jobs), seconds)
        record(made)
        for job_id, expected in jobs.items():
            one.accounted(job_id, list(expected))
            self._counts(job_id)
        self._computed_once(jobs)
        try:
            wait_until(lambda: not self._left(), "nothing is left", 20)
        except AssertionError:
            raise AssertionError(f"left: {self._left()}") from None
        one.left_nothing()
        return made

    def _went_on(self) -> bool:
        try:
            return all(map(self._has_moved, self._in_step)) and self.done(self.in_work)
        except redis.RedisError:
            return False

    def _stuck(self) -> str:
        ledger = self._one.ledger
        jobs = [job for job in ledger.jobs(ledger.unfinished()) if job]
        tails = "\n".join(worker.log[-3000:] for worker in self._one.workers)
        return f"in work: {self.in_work}, in step: {self._in_step}, {ledger.depth()}, {jobs}\n{tails}"

    def _has_moved(self, job_id: str) -> bool:
        job = self._one.ledger.job(job_id)
        return self._ended(job_id) if job is None else job.state is not self._in_step[job_id]

    def _ended(self, job_id: str) -> bool:
        return self._one.store.size(f"jobs/{job_id}/manifest.json") is not None

    def _lost_and_doubled(self, jobs: Mapping[str, Sequence[str]]) -> tuple[int, int]:
        lost = doubled = 0
        for job_id, expected in jobs.items():
            output, failed = self._one.lines(job_id)
            found = Counter(line["custom_id"] for line in output + failed)
            lost += sum(name not in found for name in expected)
            doubled += sum(count - 1 for count in found.values())
        return lost, doubled

    def _counts(self, job_id: str) -> None:
        output, failed = self._one.lines(job_id)
        counts = self._one.batch(job_id).request_counts
        ran = [line for line in failed if not _never_ran(line)]
        assert counts.total == len(output) + len(failed), counts
        assert (counts.completed, counts.failed) == (len(output), len(ran)), counts

    def _recomputed(self, jobs: Mapping[str, Sequence[str]]) -> int:
        computed = self.computed()
        names = [request_id(job_id, row) for job_id, rows in jobs.items() for row in range(len(rows))]
        return sum(max(0, computed[name] - 1) for name in names)

    def _computed_once(self, jobs: Mapping[str, Sequence[str]]) -> None:
        for name, times in self.computed().items():
            assert times <= 1 + self._in_flight[name] or name.rpartition(":")[0] not in jobs, (
                f"{name} was computed {times} times"
            )

    def _left(self) -> list[str]:
        return leftovers.left(self._one.ledger, self._one.store, self._one.settings.namespace)


def record(made: Round) -> None:
    """Append a round to the report, if one is wanted."""
    if path := os.environ.get(REPORT):
        with open(path, "ab") as report:
            report.write(orjson.dumps(asdict(made)) + b"\n")


def _belongs(name: str, jobs: Container[str]) -> bool:
    return name.rpartition(":")[0] in jobs


def _is_set(name: str, done: Mapping[str, bytes]) -> bool:
    job_id, _, row = name.rpartition(":")
    bits, place = done[job_id], int(row)
    return len(bits) > place // 8 and bool(bits[place // 8] >> (7 - place % 8) & 1)


def _never_ran(line: dict[str, object]) -> bool:
    error = line["error"]
    return isinstance(error, dict) and error["code"] in ("batch_cancelled", "batch_expired")
