"""Batches: create, look, list, cancel, delete."""

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query
from pydantic import BaseModel

from api import paging, upload
from api.auth import Tenant
from api.context import Context, Deps
from jobs import creation, queue, schema, traces
from jobs.accept import digest
from jobs.creation import NewBatch
from jobs.records import JobRecord

router = APIRouter(prefix="/v1/batches", tags=["Batches"])
_CLOCK_SECONDS = 0.01
"""A job's time of creation is cut to milliseconds."""
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/NewBatch"}}},
    }
}


@router.post("", summary="Create a batch", openapi_extra=_BODY)
def create_batch(
    tenant: Tenant,
    context: Deps,
    body: Annotated[Any, Depends(upload.json_body)],
    idempotency_key: Annotated[
        str | None, Header(description="Sent again with the same body it answers the same batch; else 409.")
    ] = None,
    traceparent: Annotated[
        str | None, Header(description="The client's span (W3C Trace Context): the batch joins its trace.")
    ] = None,
) -> schema.Batch:
    """Create a batch from an uploaded file or from `requests` given inline.

    The batch is `validating` at first; errors in its lines make it `failed` then. An answer of 200 means that
    it is stored durably. After an error 5xx send it again with the same Idempotency-Key: there will be one
    batch.
    """
    began = time.time()
    new = creation.parse(body)
    key = _checked_key(idempotency_key)
    record = context.acceptor.create(tenant, new, key, digest(body), traces.checked(traceparent))
    context.queue.send(queue.PLAN, record.id)
    _trace(context, record, began)
    return context.batches.shown(record)


@router.get("", summary="List batches")
def list_batches(
    tenant: Tenant,
    context: Deps,
    after: Annotated[str | None, Query(description="The id of the last batch of the page before.")] = None,
    limit: Annotated[int, Query(description="0 to 100.")] = 20,
) -> schema.Page:
    """Return a page of batches, newest first."""
    limit = paging.checked(limit, 0, 100)
    batches, more = context.batches.page(tenant, limit, after)
    return paging.page(batches, more)


@router.get("/{batch_id}", summary="Look at a batch")
def get_batch(tenant: Tenant, context: Deps, batch_id: str) -> schema.Batch:
    """Return a batch's status, counts and usage, and its files once it has ended."""
    return context.batches.get(tenant, batch_id)


@router.post("/{batch_id}/cancel", summary="Cancel a batch")
def cancel_batch(tenant: Tenant, context: Deps, batch_id: str) -> schema.Batch:
    """Stop a batch: what has finished is kept, the rest gets `batch_cancelled` lines.

    Repeating it changes nothing; a batch that has ended otherwise, or is about to, answers 409.
    """
    batch = context.batches.cancel(tenant, batch_id)
    if batch.status == "cancelling":
        context.queue.send(queue.FINALIZE, batch_id)
    return batch


class DeletedBatch(BaseModel):
    """The answer to a deletion."""

    id: str
    object: Literal["batch"] = "batch"
    deleted: Literal[True] = True


@router.delete("/{batch_id}", summary="Delete a batch")
def delete_batch(tenant: Tenant, context: Deps, batch_id: str) -> DeletedBatch:
    """Remove a batch that has ended, its result files, and all else that is stored of it. Longhaul's own.

    The input file stays. A batch that has not ended answers 409: cancel it first. Its Idempotency-Key may be
    used anew.
    """
    context.batches.delete(tenant, batch_id)
    return DeletedBatch(id=batch_id)


def _trace(context: Context, record: JobRecord, began: float) -> None:
    """Note the job's first span, unless an earlier send of the same request made the job."""
    if context.traces.on and record.created_at > began - _CLOCK_SECONDS:
        facts: traces.Attributes = {
            "longhaul.endpoint": record.endpoint,
            "longhaul.priority": record.priority,
        }
        context.traces.note(
            traces.Span(record.id, record.traceparent, traces.FIRST, began, time.time(), facts)
        )


def _checked_key(key: str | None) -> str | None:
    if key is not None and not 0 < len(key) <= 255:
        raise creation.refusal("Idempotency-Key must have 1 to 255 characters.", "Idempotency-Key")
    return key


SCHEMAS = {"NewBatch": NewBatch.model_json_schema(ref_template="#/components/schemas/{model}")}
