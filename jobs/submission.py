"""What `submit` does before a job exists: open the file, look at its first line, upload it."""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jobs import client, errors, lines, schema

_FIRST_LINE_BYTES = 10_000_000


@contextlib.contextmanager
def opened(file: str) -> Iterator[BinaryIO]:
    """Open a file ('-': a seekable copy of standard input); raise InvalidRequest if it is empty."""
    with _standard_input() if file == "-" else _regular(Path(file)) as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            raise errors.InvalidRequest(f"{_name(file)} is empty: it needs one request a line.")
        stream.seek(0)
        yield stream


def first_url(file: str, stream: BinaryIO) -> str | None:
    """Return the url of the first request where it names an endpoint.

    Raises InvalidRequest when its line is no JSON object: the file is another than was meant. The server
    judges all else, later.
    """
    stream.seek(0)
    line = next(lines.read(stream, _FIRST_LINE_BYTES), None)
    if line is None or line.data is None:
        return None
    try:
        request, _ = lines.parse(line.data)
    except ValueError:
        raise _no_request(file, line.number, "JSON") from None
    if not isinstance(request, dict):
        raise _no_request(file, line.number, "a JSON object")
    url = request.get("url")
    return url if url in schema.ENDPOINTS else None


def upload(api: client.Client, file: str, stream: BinaryIO, once: bool) -> str:
    """Upload the stream and return the file's id.

    With `once`, a file of the same content that was uploaded this way before is used again: one
    Idempotency-Key stands for one request body, and the file's id is part of that body.
    """
    name = _name(file)
    if not once:
        return api.upload(name, stream)
    stream.seek(0)
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    name = f"{digest.hexdigest()}-{name}"
    return api.uploaded(name, stream.tell()) or api.upload(name, stream)


def _no_request(file: str, number: int, what: str) -> errors.InvalidRequest:
    name = "standard input" if file == "-" else Path(file).name
    advice = "FILE has one request a line, as in examples/prompts.jsonl (README)."
    return errors.InvalidRequest(f"{name}: line {number} is not {what}. {advice}")


def _name(file: str) -> str:
    return "stdin.jsonl" if file == "-" else Path(file).name


@contextlib.contextmanager
def _standard_input() -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        yield copy


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise errors.InvalidRequest(f"{path} cannot be read: {error.strerror}.") from None
