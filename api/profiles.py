"""A batch's profile, gathered from its parts while somebody looks: each part is read once."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from api import results
from api.auth import Tenant
from api.context import Deps
from jobs import errors
from jobs import results as rows
from jobs.profile import gather
from jobs.records import PartEntry
from jobs.store import ObjectStore

router = APIRouter(prefix="/v1/batches", tags=["Results"])
_REMEMBERED = 64
_READ_SECONDS = 0.5
"""How long one call reads: others wait for the same core. The next call goes on."""


@router.get("/{batch_id}/profile", summary="Distributions and rates of a batch", response_class=Response)
def get_profile(tenant: Tenant, context: Deps, batch_id: str, request: Request) -> Response:
    """Return how latencies and lengths spread, rates over time, and errors by code, of what has finished.

    A call reads for half a second at most: while `parts_read` is less than `parts`, ask again. Percentiles of
    latencies are within 1 % while the batch runs, and exact when it has ended.
    """
    record = context.batches.record(tenant, batch_id)
    parts = context.ledger.parts(batch_id)
    manifest = context.batches.ended(record, context.ledger.job(batch_id))
    if results.expired(record, manifest):
        raise errors.ResultsExpired(id=batch_id)
    if manifest is not None:
        parts = [PartEntry(**part) for part in manifest.parts]
    read, figures = request.app.state.profiles.of(batch_id, parts)
    if summary := results.summary(context, manifest):
        figures = figures.exactly(orjson.loads(summary))
    facts = {"id": batch_id, "object": "batch.profile", "parts": len(parts), "parts_read": read}
    return Response(orjson.dumps(facts | vars(figures)), media_type="application/json")


class Profiles:
    """The profiles of the jobs that were looked at last. One thread reads; the others show what is known."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: OrderedDict[str, _Reading] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def of(self, job_id: str, parts: Sequence[PartEntry]) -> tuple[int, gather.Figures]:
        """Return how many parts have been read, and the profile of those; reads some more."""
        with self._lock:
            one = self._known.setdefault(job_id, _Reading())
            if not one.begins(parts):
                one = self._known[job_id] = _Reading()
            self._known.move_to_end(job_id)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        if one.unread(parts) and self._reading.acquire(blocking=False):
            try:
                one.read(self._store, job_id, parts, time.monotonic() + _READ_SECONDS)
            finally:
                self._reading.release()
        return one.shown


class _Reading:
    """One job's profile and the parts in it. After a loss of Redis parts may come back otherwise."""

    def __init__(self) -> None:
        self._profile = gather.Profile()
        self._read: dict[str, PartEntry] = {}
        self.shown = (0, self._profile.build())

    def begins(self, parts: Sequence[PartEntry]) -> bool:
        """Tell whether all that was read is still among the parts."""
        known = self._read
        return sum(known.get(part.name) == part for part in parts) == len(known)

    def unread(self, parts: Sequence[PartEntry]) -> bool:
        return len(self._read) < len(parts)

    def read(self, store: ObjectStore, job_id: str, parts: Sequence[PartEntry], until: float) -> None:
        """Read parts that are new, one at least."""
        for part in parts:
            if part.name in self._read:
                continue
            # All of it first: one that breaks off is read again, and counts once.
            for row in list(rows.read_part(store, job_id, part)):
                self._profile.add(row)
            self._read[part.name] = part
            if time.monotonic() >= until:
                break
        self.shown = (len(self._read), self._profile.build())
