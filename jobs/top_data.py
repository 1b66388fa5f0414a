"""What `longhaul top` shows: a page of jobs with their pace, the queue and the workers, read from the API."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from jobs import client, eta, overall, progress, standstill


@dataclass(frozen=True)
class Row:
    """A job and how fast it goes: over the last minute, or since it began where that is not known yet.

    Of one that has ended, how fast it was as a whole.
    """

    id: str
    status: str
    model: str | None
    done: int
    total: int
    failed: int
    requests_per_second: float
    output_tokens_per_second: float
    seconds_left: float | None
    """None also while nothing runs it."""
    standstill: str | None = None
    """Why it does not move, as far as the queue tells."""


@dataclass(frozen=True)
class Snapshot:
    """What the server told at one moment. `more`: jobs are behind these; workers None: it tells of none."""

    at: float
    jobs: list[Row]
    more: bool
    queue: dict[str, Any]
    workers: list[dict[str, Any]] | None
    after: str | None = None
    """The job behind which the first one comes."""

    def json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


class Reader:
    """Reads snapshots, and remembers the pace of the jobs it saw last."""

    def __init__(self, api: client.Client, clock: Callable[[], float] = time.time) -> None:
        self._api, self._clock = api, clock
        self._paces: dict[str, progress.Pace] = {}

    def read(self, most_jobs: int, after: str | None = None) -> Snapshot:
        """Return up to `most_jobs` jobs from behind the job `after`, the queue, and the workers."""
        batches = self._api.batches(most_jobs + 1, after)
        queue = self._api.queue()
        workers, now = self._workers(), self._clock()
        shown = batches[:most_jobs]
        self._paces = {one.id: self._paces.get(one.id) or progress.Pace() for one in shown}
        view = standstill.QueueView.model_validate(queue)
        there = [standstill.WorkerView.model_validate(one) for one in workers or ()]
        rows = []
        for one in shown:
            why = standstill.why(one, view)
            stands = bool(why or workers == [] or standstill.loading(one, there))
            rows.append(self._row(one, now, why, stands))
        return Snapshot(now, rows, len(batches) > most_jobs, queue, workers, after)

    def _workers(self) -> list[dict[str, Any]] | None:
        try:
            return list(self._api.get("/v1/workers")["data"])
        except client.ServerRefused as error:
            if error.status != 404:
                raise
            return None

    def _row(self, batch: client.Batch, now: float, why: str | None, stands: bool) -> Row:
        pace, counts = self._paces[batch.id], batch.request_counts
        if batch.status == "in_progress":
            pace.add(now, batch.done, batch.usage.output_tokens, counts.failed)
        rate, tokens = self._speed(batch, now, stands)
        left = None if stands or batch.status != "in_progress" else _left(batch, pace, now)
        return Row(
            batch.id,
            batch.status,
            batch.model,
            batch.done,
            counts.total,
            counts.failed,
            round(rate, 3),
            round(tokens, 3),
            None if left is None else round(left, 1),
            why,
        )

    def _speed(self, batch: client.Batch, now: float, stands: bool) -> overall.Speed:
        pace, whole = self._paces[batch.id], overall.speed(batch, now)
        if batch.ended:
            return whole
        requests, tokens = pace.requests_per_second, pace.tokens_per_second
        if stands:
            return overall.Speed(requests, tokens)
        return overall.Speed(requests or whole.requests_per_second, tokens or whole.tokens_per_second)


def _left(batch: client.Batch, pace: progress.Pace, now: float) -> float | None:
    counts = batch.request_counts
    left = pace.eta_seconds(counts.total - batch.done)
    if left is not None:
        return left
    look = eta.Look(overall.seconds(batch, now), counts.completed, counts.failed)
    return eta.since_start(look, counts.total)
