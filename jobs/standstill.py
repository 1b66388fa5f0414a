"""Why a job does not move: nobody runs its model, a step of it fails, or a worker has only just begun."""

import re
from collections.abc import Collection, Sequence

from pydantic import BaseModel, ConfigDict

from jobs import errors, hints, values
from jobs.client import Batch, Client

SECONDS = 10.0
"""A job that has not moved for so long is asked about, and again after as long."""
_SOON_SECONDS = 2.0
"""One of which no request has ended is asked about sooner: a model is loaded, or nobody is there."""
NOBODY = "no worker is there"


class _View(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ModelView(_View):
    """What the server tells of a model; an older one does not tell of workers."""

    model: str
    depth: int = 0
    workers: int | None = None
    reason: str | None = None


class FailingView(_View):
    batch: str
    unit: str
    failures: int
    reason: str


class WorkerView(_View):
    state: str
    models: list[str] = []
    running: int = 0


class QueueView(_View):
    """What `GET /v1/queue` tells."""

    models: list[ModelView] = []
    workers: int | None = None
    failing: list[FailingView] = []


def why(batch: Batch, queue: QueueView) -> str | None:
    """Return why a job does not move, None if the queue tells nothing."""
    if batch.ended:
        return None
    for step in queue.failing:
        if step.batch == batch.id:
            return fails(step.unit, step.failures, step.reason)
    if queue.workers == 0:
        return NOBODY
    if batch.status != "in_progress":
        return None
    own = (model for model in queue.models if model.model == batch.model)
    return next(filter(None, (missing(one.model, one.depth, one.workers, one.reason) for one in own)), None)


def fails(step: str, failures: int, reason: str) -> str:
    """Return what is told of a job's step that fails."""
    times = "once" if failures == 1 else f"{failures} times"
    return f"its step {step!r} has failed {times} and is tried again: {reason}"


def missing(model: str, depth: int, workers: int | None, reason: str | None) -> str | None:
    """Return what is told of a model that nobody runs, though requests of it wait."""
    if not depth or workers != 0:
        return None
    return f"no worker runs {model}" + (f": {reason}" if reason else "")


def loads(model: str | None, states: Collection[str]) -> str | None:
    """Return what is told of a model whose workers, in these states, all load it still."""
    if "loading" not in states or "serving" in states:
        return None
    name = f"the model {model}" if model else "the model"
    return f"a worker is loading {name}, a minute or more on the first run, as kernels are compiled"


def asked(client: Client, batch: Batch) -> str | None:
    """Return why a job does not move, and what to do; None also where the server does not say."""
    if batch.ended:
        return None
    try:
        queue = QueueView.model_validate(client.queue())
        reason = why(batch, queue)
        if reason != NOBODY:
            return reason
        return f"{reason}; start one: {hints.worker(hints.any_of(len(queue.models)))}"
    except (errors.LonghaulError, ValueError):
        return None


def now(client: Client, batch: Batch) -> str | None:
    """Return why a job does not move, or that a worker is only loading its model."""
    return asked(client, batch) or beginning(client, batch, late=False)


def beginning(client: Client, batch: Batch, late: bool = True) -> str | None:
    """Return what a job waits for where nothing is wrong: its model; `late` also the first request's end."""
    if batch.ended:
        return None
    try:
        workers = [WorkerView.model_validate(one) for one in client.get("/v1/workers")["data"]]
    except (errors.LonghaulError, ValueError, KeyError):
        return None
    return (begins if late and not batch.done else loading)(batch, workers)


def begins(batch: Batch, workers: Sequence[WorkerView]) -> str | None:
    """Return how far its workers are: they load the model, or run the first requests."""
    if said := loading(batch, workers):
        return said
    running = sum(one.running for one in _own(batch, workers))
    if batch.status != "in_progress" or not running:
        return None
    return f"{values.counted(running, 'request')} in work, of which the first has not ended"


def loading(batch: Batch, workers: Sequence[WorkerView]) -> str | None:
    """Return that a worker is loading a job's model, if none has done so."""
    return None if batch.ended else loads(batch.model, {one.state for one in _own(batch, workers)})


def _own(batch: Batch, workers: Sequence[WorkerView]) -> list[WorkerView]:
    return [one for one in workers if batch.model is None or batch.model in one.models]


class Standstill:
    """Notices that a job does not move, and says why: once, and again when that changes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seen: tuple[str, int] | None = None
        self._late_at = self._look_at = 0.0
        self._told: str | None = None

    @property
    def stands(self) -> bool:
        """Whether there was a reason at the last look."""
        return self._told is not None

    def look(self, batch: Batch, now: float) -> str | None:
        """Return what is to be told now."""
        seen = (batch.status, batch.done)
        if seen != self._seen:
            if batch.done:
                self._told = None
            self._seen, self._late_at = seen, now + SECONDS
            self._look_at = self._late_at if batch.done else now + _SOON_SECONDS
        if now < self._look_at:
            return None
        late = now >= self._late_at
        self._look_at = now + SECONDS if late else self._late_at
        reason = asked(self._client, batch) or beginning(self._client, batch, late)
        # How often a step has failed is no other reason, nor is a model whose name is known by now.
        kind = reason and re.sub(r"(?<=failed) (once|\d+ times)|(?<=the model) [^,]+", "", reason)
        new = reason if kind != self._told else None
        self._told = kind
        return new
