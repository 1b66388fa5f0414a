"""What `submit` does before a job exists: open the file, look at its first line, upload it."""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import orjson

from jobs import client, errors, schema

_FIRST_LINE_BYTES = 10_000_000


@contextlib.contextmanager
def opened(file: str) -> Iterator[IO[bytes]]:
    """Open a file ('-': a seekable copy of standard input); raise InvalidRequest if it is empty."""
    with _standard_input() if file == "-" else _regular(Path(file)) as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            raise errors.InvalidRequest(f"{_name(file)} is empty: it needs one request a line.")
        stream.seek(0)
        yield stream


def first_url(stream: IO[bytes]) -> str | None:
    """Return the url of the first request where it names an endpoint; the server judges all lines later."""
    stream.seek(0)
    line = stream.readline(_FIRST_LINE_BYTES).removeprefix(b"\xef\xbb\xbf")
    with contextlib.suppress(orjson.JSONDecodeError, TypeError, KeyError):
        url = orjson.loads(line)["url"]
        return url if url in schema.ENDPOINTS else None
    return None


def upload(api: client.Client, file: str, stream: IO[bytes], once: bool) -> str:
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


def _name(file: str) -> str:
    return "stdin.jsonl" if file == "-" else Path(file).name


@contextlib.contextmanager
def _standard_input() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        yield copy


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise errors.InvalidRequest(f"{path} cannot be read: {error.strerror}.") from None
