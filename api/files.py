"""Files: upload, list, look, delete, and stream their content."""

import asyncio
import re
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api import paging, upload
from api.auth import Tenant
from api.context import Deps
from jobs import errors, schema, views
from jobs.files import PURPOSES

router = APIRouter(prefix="/v1/files", tags=["Files"])
_CHUNK = 1 << 18
_RANGE = re.compile(r"bytes=([0-9]{1,15})-", re.ASCII)
_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "The JSONL file."},
        "purpose": {"type": "string", "enum": list(PURPOSES), "description": "'batch' for a batch's input."},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


class Deleted(BaseModel):
    """The answer to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@router.post("", summary="Upload a file", openapi_extra=_UPLOAD)
def create_file(
    tenant: Tenant, context: Deps, form: Annotated[upload.Upload, Depends(upload.upload)]
) -> schema.File:
    """Store a file. Its lines are not read here: what is wrong with them fails the batch that uses it.

    The size limit is LONGHAUL_MAX_FILE_BYTES. An expired file answers 404.
    """
    with context.quotas.storing(tenant, form.file.size or 0):
        record = context.files.add(tenant, form.filename, form.purpose, form.file.file, form.expires_seconds)
    return views.file(record)


@router.get("", summary="List files")
def list_files(
    tenant: Tenant,
    context: Deps,
    purpose: Annotated[str | None, Query(description="Only files with this purpose.")] = None,
    limit: Annotated[int, Query(description="1 to 10000.")] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="By time of creation.")] = "desc",
    after: Annotated[str | None, Query(description="The id of the last file of the page before.")] = None,
) -> schema.Page:
    """Return a page of files, results of batches included (purpose `batch_output`)."""
    limit = paging.checked(limit, 1, 10_000)
    records, more = context.files.page(tenant, purpose, limit, order == "desc", after)
    return paging.page([views.file(record) for record in records], more)


@router.get("/{file_id}", summary="Look at a file")
def get_file(tenant: Tenant, context: Deps, file_id: str) -> schema.File:
    """Return a file's facts."""
    return views.file(context.files.get(tenant, file_id))


@router.delete("/{file_id}", summary="Delete a file")
def delete_file(tenant: Tenant, context: Deps, file_id: str) -> Deleted:
    """Forget a file at once. Batches that were already created with it run on."""
    record = context.files.get(tenant, file_id)
    keep = record.purpose == "batch" and context.batches.reads_open_job(record)
    context.files.delete(record, keep_bytes=keep)
    return Deleted(id=file_id)


@router.get("/{file_id}/content", summary="Download a file", response_class=StreamingResponse)
def get_content(tenant: Tenant, context: Deps, file_id: str, request: Request) -> StreamingResponse:
    """Stream a file's bytes. `Range: bytes=N-` continues a broken download."""
    record = context.files.get(tenant, file_id)
    start = _start(request.headers.get("range"), record.bytes)
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Length": str(record.bytes - start),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
    }
    if start:
        headers["Content-Range"] = f"bytes {start}-{record.bytes - 1}/{record.bytes}"
    try:
        stream = context.store.open(record.key, start)
    except errors.NotFound:  # deleted since its record was read
        raise errors.NotFound(what="file", id=file_id) from None
    return _Download(stream, 206 if start else 200, headers)


class _Download(StreamingResponse):
    """Streams a file, and closes it however that ends: a client that goes away ends nothing by itself."""

    def __init__(self, stream: BinaryIO, status: int, headers: dict[str, str]) -> None:
        super().__init__(_chunks(stream), status, headers, media_type="application/octet-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.to_thread(self._stream.close)


def _start(header: str | None, size: int) -> int:
    """Return where to start by a Range header; forms other than 'from N on' are ignored, as HTTP allows."""
    match = _RANGE.fullmatch(header or "")
    start = int(match[1]) if match else 0
    return start if start < size else 0


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK):
        yield chunk
