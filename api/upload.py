"""Read a request's body with limits: multipart forms stream to disk, JSON is held only up to a bound."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from api.context import of
from jobs import errors, lines, values
from jobs.creation import refusal
from jobs.files import PURPOSES

_FORM_BYTES = 65_536
"""What boundaries, headers and the small fields of a form may take beside the file."""
_DRAIN_SECONDS = 20
_LARGE_BYTES = 1_000_000
LARGE_AT_ONCE = 2
_SLOWEST = 1000
"""Bytes a second; over the time that was spent waiting for them."""
_MOST_LEVELS = lines.MOST_LEVELS + 2
"""A request may nest as deeply inline as in a file: it lies in an array in an object."""
_EXPIRY = ("expires_after[anchor]", "expires_after[seconds]")


@dataclass(frozen=True)
class Upload:
    """A checked upload form; `file` holds its bytes on disk once they are more than a megabyte."""

    file: UploadFile
    filename: str
    purpose: str
    expires_seconds: int | None


async def upload(request: Request) -> AsyncIterator[Upload]:
    """Parse an upload while it arrives, with flat memory; raise TooLarge as soon as it is too large."""
    limit = of(request).settings.max_file_bytes
    too_large = errors.TooLarge(what="The file", limit=limit, setting="LONGHAUL_MAX_FILE_BYTES", param="file")
    form = await _form(request, _limited(request, limit + _FORM_BYTES, too_large))
    try:
        checked = _checked(form)
        if (checked.file.size or 0) > limit:
            raise too_large
        yield checked
    finally:
        await form.close()


async def json_body(request: Request) -> AsyncIterator[Any]:
    """Read a JSON body of bounded size; raise TooLarge or InvalidRequest.

    As values a large body takes up to fifty times its bytes, so few of them are looked at together.
    """
    limit = of(request).settings.max_inline_bytes
    too_large = errors.TooLarge(
        what="The body (upload a file for more requests)", limit=limit, setting="LONGHAUL_MAX_INLINE_BYTES"
    )
    data = bytearray()
    async for chunk in _limited(request, limit, too_large):
        data += chunk
    turn = request.app.state.large_bodies if len(data) > _LARGE_BYTES else nullcontext()
    async with turn:
        # In a thread: it takes seconds for a body of millions of small values, and others are to be served.
        yield await asyncio.to_thread(_parsed, data)


def _parsed(data: bytearray) -> Any:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise refusal(f"The body is not valid JSON: {error}.", None, "invalid_json") from None
    if values.too_deep(body, _MOST_LEVELS):
        raise refusal(f"The body nests more than {_MOST_LEVELS} levels deep.", None, "invalid_json")
    return body


async def _limited(request: Request, limit: int, too_large: errors.TooLarge) -> AsyncGenerator[bytes, None]:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        await _drain(request, limit)
        raise too_large
    received = 0
    async for chunk in _arriving(request):
        received += len(chunk)
        if received > limit:
            await _drain(request, limit)
            raise too_large
        yield chunk


async def _arriving(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body as it arrives; raise TooSlow when it does not."""
    patience = of(request).settings.upload_idle_seconds
    stream = request.stream()
    waited, received = 0.0, 0
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise errors.TooSlow(reason=f"nothing came for {patience:g} s") from None
        if chunk is None:
            return
        # Only the time spent waiting counts: how long we take to write is not the client's fault.
        waited += time.monotonic() - began
        received += len(chunk)
        if waited > patience and received < waited * _SLOWEST:
            raise errors.TooSlow(reason=f"fewer than {_SLOWEST} bytes a second came")
        yield chunk


async def _drain(request: Request, limit: int) -> None:
    # A client that is cut off while it sends sees a broken connection instead of our answer: so read on for a
    # while, into nothing. One that asked first (Expect: 100-continue) has not begun to send.
    if request.headers.get("expect", "").lower() == "100-continue":
        return
    until = time.monotonic() + _DRAIN_SECONDS
    received = 0
    with suppress(errors.TooSlow):
        async for chunk in _arriving(request):
            received += len(chunk)
            if received > limit or time.monotonic() > until:
                return


async def _form(request: Request, stream: AsyncGenerator[bytes, None]) -> FormData:
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise refusal("Send the file as multipart/form-data, with the fields 'file' and 'purpose'.", "file")
    _, options = parse_options_header(request.headers["content-type"])
    # Others decode to what is no text, or take their time.
    if options.get(b"charset", b"utf-8").lower() != b"utf-8":
        raise refusal("The form's charset must be utf-8.", None)
    parser = MultiPartParser(request.headers, stream, max_files=1, max_fields=16, max_part_size=_FORM_BYTES)
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise refusal(f"The form cannot be read: {error.message}", None) from None


def _checked(form: FormData) -> Upload:
    for name in form:
        if name not in ("file", "purpose", "expires_after", *_EXPIRY):
            raise refusal(f"Unknown parameter: {name!r:.100}.", name[:100], "unknown_parameter")
        if len(form.getlist(name)) > 1:
            raise refusal(f"{name} is given more than once.", name)
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        code = "missing_required_parameter" if file is None else "invalid_value"
        raise refusal("The form needs a field 'file' with a file name and the file's bytes.", "file", code)
    if not isinstance(purpose, str):
        raise refusal("The form needs a field 'purpose'.", "purpose", "missing_required_parameter")
    if purpose not in PURPOSES:
        raise refusal(f"purpose must be one of {', '.join(PURPOSES)}, not {purpose!r:.80}.", "purpose")
    name = (file.filename or "upload").replace("\\", "/").rpartition("/")[2]
    return Upload(file, name[:255] or "upload", purpose, _expires_seconds(form))


def _expires_seconds(form: FormData) -> int | None:
    anchor, seconds = (form.get(name) for name in _EXPIRY)
    if form.get("expires_after") is not None:
        raise refusal(f"Send expires_after as the fields {' and '.join(_EXPIRY)}.", "expires_after")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise refusal("expires_after[anchor] must be 'created_at'.", _EXPIRY[0])
    valid = isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) <= 7
    number = int(str(seconds)) if valid else 0
    if not 3600 <= number <= 2_592_000:
        raise refusal(f"expires_after[seconds] must be 3600 to 2592000, not {seconds!r:.40}.", _EXPIRY[1])
    return number
