"""What a batch has produced so far: its finished lines, and its metrics."""

import base64
import binascii
import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from api.auth import Tenant
from api.context import Context, Deps
from jobs import errors, finalize, results, schema, views
from jobs.creation import refusal
from jobs.ledger import Job, State
from jobs.records import JobRecord, Manifest, PartEntry

router = APIRouter(prefix="/v1/batches", tags=["Results"])
NEXT_AFTER = "Longhaul-Next-After"
STATUS = "Longhaul-Batch-Status"
_PIECE_BYTES = 1 << 16
_CURSOR = re.compile(r"([0-9]{1,9})\.([0-9a-f]{16})", re.ASCII)
_HEADERS = {
    NEXT_AFTER: {"description": "The cursor to continue with.", "schema": {"type": "string"}},
    STATUS: {
        "description": "Read before the lines: once it is final, no line comes after these.",
        "schema": {"type": "string"},
    },
}


@router.get(
    "/{batch_id}/results",
    summary="Stream finished lines",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {}}, "headers": _HEADERS}},
)
def get_results(
    tenant: Tenant,
    context: Deps,
    batch_id: str,
    after: Annotated[
        str | None, Query(description=f"The {NEXT_AFTER} of the answer before. Without it: from the start.")
    ] = None,
) -> StreamingResponse:
    """Stream the lines that have finished, successes and errors, as they were written, while the batch runs.

    Whichever workers write, following the cursor never skips or repeats a line. If an answer breaks off, ask
    again with the cursor it was asked with. Results that have expired answer 404.
    """
    record = context.batches.record(tenant, batch_id)
    # In this order: the ledger drops a job's parts in the step that ends it, so a job not ended had them all.
    parts = context.ledger.parts(batch_id)
    job = context.ledger.job(batch_id)
    manifest = context.batches.ended(record, job)
    if expired(record, manifest):
        raise errors.ResultsExpired(id=batch_id)
    if manifest is not None:
        parts = [PartEntry(**part) for part in manifest.parts]
    seen, digest = _parse(after) if after is not None else (0, _digest([]))
    if manifest is None and (job is None or (seen > len(parts) and job.state is State.VALIDATING)):
        raise errors.Unavailable("The queue has lost this batch; it is being recovered. Ask again later.")
    if seen > len(parts) or digest != _digest(parts[:seen]):
        # After a loss of Redis the parts are registered anew, in an order that need not be the old one.
        raise errors.Conflict("This cursor is of before a recovery: read from the start.", param="after")
    headers = {NEXT_AFTER: _cursor(parts), STATUS: _status(job, manifest)}
    return StreamingResponse(
        _lines(context, batch_id, parts[seen:]), media_type="application/x-ndjson", headers=headers
    )


@router.get("/{batch_id}/metrics", summary="Metrics of a batch", response_class=Response)
def get_metrics(tenant: Tenant, context: Deps, batch_id: str) -> Response:
    """Return the summary of an ended batch (`summary.json`), or counts, usage and rates of a running one."""
    record = context.batches.record(tenant, batch_id)
    job = context.ledger.job(batch_id)
    manifest = context.batches.ended(record, job)
    found = None if expired(record, manifest) else summary(context, manifest)
    if found is None:
        batch = views.batch(record, job, manifest, False)
        found = orjson.dumps(_so_far(batch, job, time.time()))
    return Response(found, media_type="application/json")


def summary(context: Context, manifest: Manifest | None) -> bytes | None:
    """Return the summary of an ended batch, unless it failed before it ran, or its file is gone since."""
    if manifest is None or "summary" not in manifest.files:
        return None
    try:
        return context.store.get(manifest.files["summary"]["key"])
    except errors.NotFound:
        return None


def _so_far(batch: schema.Batch, job: Job | None, now: float) -> dict[str, Any]:
    began = job.times.get("in_progress_at") if job else None
    seconds = max(now - began, 0.001) if began else None
    counts, usage = batch.request_counts, batch.usage
    return {
        "id": batch.id,
        "object": "batch.metrics",
        "status": batch.status,
        "request_counts": counts.model_dump(),
        "usage": usage.model_dump(),
        "seconds": seconds,
        "requests_per_second": (counts.completed + counts.failed) / seconds if seconds else None,
        "output_tokens_per_second": usage.output_tokens / seconds if seconds else None,
        "total_tokens_per_second": usage.total_tokens / seconds if seconds else None,
    }


def expired(record: JobRecord, manifest: Manifest | None) -> bool:
    """Tell whether the results of a job, if it ended, are there no more."""
    due = finalize.expires_at(record, manifest) if manifest else None
    return due is not None and due <= time.time()


def _status(job: Job | None, manifest: Manifest | None) -> str:
    if manifest is not None:
        return manifest.state
    return str(job.state.value) if job is not None else "validating"


def _lines(context: Context, batch_id: str, parts: Sequence[PartEntry]) -> Iterator[bytes]:
    # Many lines at a time: each piece that is yielded costs a change of threads.
    piece = bytearray()
    for part in parts:
        for row in results.read_part(context.store, batch_id, part):
            piece += orjson.dumps(row.line) + b"\n"
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    yield bytes(piece)


def _cursor(parts: Sequence[PartEntry]) -> str:
    text = f"{len(parts)}.{_digest(parts)}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _parse(cursor: str) -> tuple[int, str]:
    """Return how many parts a cursor is past, and their digest."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise refusal(f"after must be a {NEXT_AFTER} of this batch, not {cursor!r:.80}.", "after")
    return int(match[1]), match[2]


def _digest(parts: Sequence[PartEntry]) -> str:
    return hashlib.sha256("\n".join(part.name for part in parts).encode()).hexdigest()[:16]
