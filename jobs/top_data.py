"""What `longhaul top` shows: a page of jobs with their pace, the queue and the workers, read from the API."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from jobs import client, eta, progress, standstill

_ENDS = ("completed_at", "failed_at", "expired_at", "cancelled_at")


@dataclass(frozen=True)
class Row:
    """A job and how fast it goes: over the last minute, or since it began where that is not known yet."""

    id: str
    status: str
    model: str | None
    done: int
    total: int
    failed: int
    requests_per_second: float
    output_tokens_per_second: float
    seconds_left: float | None
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
        rows = [self._row(one, now, standstill.why(one, view)) for one in shown]
        return Snapshot(now, rows, len(batches) > most_jobs, queue, workers, after)

    def _workers(self) -> list[dict[str, Any]] | None:
        try:
            return list(self._api.get("/v1/workers")["data"])
        except client.ServerRefused as error:
            if error.status != 404:
                raise
            return None

    def _row(self, batch: client.Batch, now: float, why: str | None) -> Row:
        pace, counts = self._paces[batch.id], batch.request_counts
        if batch.status == "in_progress":
            pace.add(now, batch.done, batch.usage.output_tokens, counts.failed)
        seconds = _seconds(batch, now)
        rate = pace.requests_per_second or batch.done / seconds
        tokens = pace.tokens_per_second or batch.usage.output_tokens / seconds
        left = pace.eta_seconds(counts.total - batch.done)
        if left is None:
            left = eta.since_start(eta.Look(seconds, counts.completed, counts.failed), counts.total)
        return Row(
            batch.id,
            batch.status,
            batch.model,
            batch.done,
            counts.total,
            counts.failed,
            round(rate, 3),
            round(tokens, 3),
            round(left, 1) if left is not None and batch.status == "in_progress" else None,
            why,
        )


def _seconds(batch: client.Batch, now: float) -> float:
    """Return how long a job has run, or did: at least a second, which is what its times are counted in."""
    began = getattr(batch, "in_progress_at", None)
    if began is None:
        return float("inf")
    ended = next((at for name in _ENDS if (at := getattr(batch, name, None))), now)
    return max(1.0, float(ended) - float(began))
