"""What `results` does: bring a job's files here, or its lines to standard output."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import orjson

from jobs import client, errors, ids, places, values

LINES = ("output", "errors")
Targets = Mapping[str, Path | None]
"""Where each kind of a job's files goes; None is standard output."""


class NotFinished(errors.LonghaulError):
    """{job} is {status} ({done} of {total}): its files are written when it ends.
    Wait with 'longhaul watch {job}', or take what is finished with 'longhaul results {job} --follow'."""


class NoFile(errors.InvalidRequest):
    """{path} is no file that can be written: without -o lines go to standard output."""


def targets(job_id: str, place: str | None, *, only_errors: bool = False, followed: bool = False) -> Targets:
    """Return what goes where: a directory takes all there is, a file or standard output one kind of lines.

    Of a job that is followed there are only lines.
    """
    kind = "errors" if only_errors else "output"
    if place is None or place == "-":
        return {kind: None}
    path = Path(place)
    if place.endswith(os.sep) or path.is_dir():
        found = places.of_job(path / f"{job_id}.jsonl")
        kinds = ("errors",) if only_errors else LINES if followed else tuple(found)
        return {kind: found[kind] for kind in kinds}
    if _is_special(path):
        raise NoFile(path=path)
    return {kind: path}


def fetch(api: client.Client, batch: client.Batch, to: Targets) -> Targets:
    """Download a finished job's files, and return what was written where.

    Output and errors without a line are empty files; metrics and summary, which a job of invalid input and
    other services do not have, are left out. A file appears under its name only when it is whole. Raises
    NotFinished.
    """
    if not batch.ended:
        total = values.counted(batch.request_counts.total, "request")
        raise NotFinished(job=batch.id, status=batch.status, done=batch.done, total=total)
    known = {"output": batch.output_file_id, "errors": batch.error_file_id}
    written = {}
    for kind, path in to.items():
        file_id = known[kind] if kind in LINES else ids.result_file_id(batch.id, kind)
        try:
            with whole(path) as stream:
                for chunk in api.content(file_id) if file_id else ():
                    stream.write(chunk)
        except client.ServerRefused as refused:
            if kind in LINES or refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise
        else:
            written[kind] = path
    return written


def follow(
    api: client.Client,
    job_id: str,
    to: Targets,
    *,
    poll_seconds: float = 1.0,
    sleep: Callable[[float], None] = time.sleep,
) -> client.Batch:
    """Write lines as their requests finish, in that order, until the job has ended and all are written."""
    cursor: str | None = None
    seen: set[str] = set()
    with contextlib.ExitStack() as stack:
        streams = {kind: stack.enter_context(_growing(path)) for kind, path in to.items()}
        while True:
            found = api.results(job_id, cursor)
            try:
                for data in found:
                    line = orjson.loads(data)
                    stream = streams.get(kind_of(line))
                    if stream and line["id"] not in seen:
                        stream.write(data + b"\n")
                    seen.add(line["id"])
            except client.ServerRefused as error:
                if cursor is None or error.status != 409:
                    raise
                # The queue was rebuilt and the cursor is void: read from the start, past what is written.
                cursor = None
                continue
            for stream in streams.values():
                stream.flush()
            if found.ended:
                return api.batch(job_id)
            cursor = found.after
            sleep(poll_seconds)


def kind_of(line: dict[str, Any]) -> str:
    """Tell to which of a job's files a line belongs."""
    response = line["response"]
    return "output" if response is not None and response["status_code"] < 400 else "errors"


@contextlib.contextmanager
def _growing(path: Path | None) -> Iterator[IO[bytes]]:
    if path is None:
        with _named(path):
            yield sys.stdout.buffer
        return
    with _named(path), path.open("wb") as stream:
        yield stream


@contextlib.contextmanager
def whole(path: Path | None) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only when it is whole; None is standard output."""
    if path is None:
        with _named(path):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    # A link stays one, and what it leads to is written, as any other program would.
    path = Path(os.path.realpath(path))
    if _is_special(path):
        raise errors.InvalidRequest(f"{path} is no file, and would be replaced by one. Name another.")
    partial = path.with_name(path.name + ".part")
    with _named(path):
        with partial.open("wb") as stream, contextlib.ExitStack() as unless_whole:
            unless_whole.callback(partial.unlink)
            yield stream
            unless_whole.pop_all()
        partial.replace(path)


def _is_special(path: Path) -> bool:
    # It would be replaced: root can do that to /dev/null.
    return path.exists() and not path.is_file()


@contextlib.contextmanager
def _named(path: Path | None) -> Iterator[None]:
    """Make the directory of a file, and say which file it is when that or the writing fails."""
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BrokenPipeError:
        # Whoever reads our output has enough: click ends the command without a word.
        raise
    except OSError as error:
        name = path or "standard output"
        raise errors.InvalidRequest(f"{name} cannot be written: {error.strerror}.") from None
