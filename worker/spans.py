"""A worker's spans: one for each group and job in it, and one for each unit of a job.

A group's span begins when it is claimed and ends when its last request is written or given back. All is noted
in a thread of its own, which may wait for the store; who claims and writes only puts it down.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from jobs import answers, errors, traces
from jobs.ledger import Group, Lease
from jobs.memo import Memo
from jobs.records import NO_USAGE, JobRecord, ResultRow, Usage, added
from jobs.settings import Settings
from jobs.store import ObjectStore

log = logging.getLogger(__name__)
OPERATIONS = {answers.CHAT: "chat", answers.COMPLETIONS: "text_completion", answers.EMBEDDINGS: "embeddings"}
"""An endpoint's name in OpenTelemetry's conventions for generative AI."""
_JOBS_KNOWN = 1000
_CLOSE_SECONDS = 1.0


class Sink(Protocol):
    """What hears of a worker's work."""

    def claimed(self, number: int, group: Group) -> None:
        """A group was claimed; `number` counts this worker's groups."""

    def written(self, rows: list[ResultRow], leases: list[Lease]) -> None:
        """These requests' rows were accepted."""

    def dropped(self, leases: list[Lease]) -> None:
        """These leases are held no more, whatever became of the requests."""

    def unit(self, kind: str, job_id: str, began: float, attempts: int, error: str | None) -> None:
        """A unit of a job has ended (unix seconds); `error` is the kind of what it raised."""

    def close(self) -> None:
        """Send what is known, within some seconds."""


class Nobody:
    """A sink that does nothing: traces are off."""

    def claimed(self, *_: object) -> None: ...

    def written(self, *_: object) -> None: ...

    def dropped(self, *_: object) -> None: ...

    def unit(self, *_: object) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Open:
    """A group's requests of one job, and what has become of them."""

    number: int
    group: Group
    began: float
    first: Lease
    left: set[str]
    usage: Usage = NO_USAGE
    done: set[str] = field(default_factory=set)
    failed: int = 0
    reasons: set[str] = field(default_factory=set)


class Spans:
    """A sink that makes spans."""

    def __init__(self, target: traces.Traces, store: ObjectStore, worker: str) -> None:
        self._traces, self._store, self._worker = target, store, worker
        self._parents = Memo(self._parent, _JOBS_KNOWN)
        self._open: dict[tuple[str, str], _Open] = {}
        self._heard: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def claimed(self, number: int, group: Group) -> None:
        self._heard.put((self._claim, time.time(), number, group))

    def written(self, rows: list[ResultRow], leases: list[Lease]) -> None:
        self._heard.put((self._write, time.time(), rows, leases))

    def dropped(self, leases: list[Lease]) -> None:
        self._heard.put((self._drop, time.time(), leases))

    def unit(self, kind: str, job_id: str, began: float, attempts: int, error: str | None) -> None:
        self._heard.put((self._unit, time.time(), kind, job_id, began, attempts, error))

    def close(self) -> None:
        self._heard.put(None)
        self._thread.join(_CLOSE_SECONDS)
        self._traces.close()

    def _run(self) -> None:
        while (heard := self._heard.get()) is not None:
            do, *arguments = heard
            try:
                do(*arguments)
            except Exception:
                log.exception("span lost")

    def _claim(self, now: float, number: int, group: Group) -> None:
        for lease in group.leases:
            place = (lease.token, lease.request.job_id)
            one = self._open.setdefault(place, _Open(number, group, now, lease, set()))
            one.left.add(lease.rid)

    def _write(self, now: float, rows: list[ResultRow], leases: list[Lease]) -> None:
        by_row = {row.row: row for row in rows}
        for lease in leases:
            one = self._open.get((lease.token, lease.request.job_id))
            row = by_row.get(lease.request.row)
            if one is None or row is None:
                continue
            one.done.add(lease.rid)
            one.failed += row.failed
            one.usage = added(one.usage, row.usage)
            one.reasons.update(_reasons(row))

    def _drop(self, now: float, leases: Iterable[Lease]) -> None:
        for lease in leases:
            place = (lease.token, lease.request.job_id)
            one = self._open.get(place)
            if one is None:
                continue
            one.left.discard(lease.rid)
            if not one.left:
                self._end(now, self._open.pop(place))

    def _end(self, now: float, one: _Open) -> None:
        request = one.first.request
        operation = OPERATIONS[request.endpoint]
        requests = sum(lease.request.job_id == request.job_id for lease in one.group.leases)
        attributes: traces.Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "longhaul",
            "gen_ai.request.model": request.model,
            "gen_ai.usage.input_tokens": one.usage[0],
            "gen_ai.usage.cache_read.input_tokens": one.usage[1],
            "gen_ai.usage.output_tokens": one.usage[2],
            "gen_ai.response.finish_reasons": sorted(one.reasons),
            "longhaul.group": one.number,
            "longhaul.bucket": one.group.bucket,
            "longhaul.alone": one.group.alone,
            "longhaul.requests": requests,
            "longhaul.requests_failed": one.failed,
            "longhaul.requests_given_back": requests - len(one.done),
            "longhaul.worker": self._worker,
        }
        error = "engine_error" if one.failed == requests else None
        name = f"{operation} {request.model}"
        parent = self._parents(request.job_id)
        self._traces.note(
            traces.Span(request.job_id, parent or None, name, one.began, now, attributes, error)
        )

    def _unit(
        self, now: float, kind: str, job_id: str, began: float, attempts: int, error: str | None
    ) -> None:
        attributes: traces.Attributes = {"longhaul.worker": self._worker, "longhaul.attempts": attempts}
        self._traces.note(
            traces.Span(job_id, self._parents(job_id) or None, kind, began, now, attributes, error)
        )

    def _parent(self, job_id: str) -> str | None:
        """Return the traceparent that a job came with, or nothing; None when its record is gone."""
        try:
            return JobRecord.from_json(self._store.get(f"jobs/{job_id}/job.json")).traceparent or ""
        except errors.LonghaulError:
            return None


def open_spans(settings: Settings, store: ObjectStore, worker: str) -> Sink:
    """Return where a worker's spans go; raises SettingsError when they cannot go anywhere."""
    opened = traces.open_traces(settings, "longhaul-worker", worker)
    return Spans(opened, store, worker) if opened.on else Nobody()


def _reasons(row: ResultRow) -> list[str]:
    response: dict[str, Any] | None = row.line["response"]
    choices = response["body"].get("choices", ()) if response and not row.failed else ()
    return [str(choice["finish_reason"]) for choice in choices]
