"""Where a report's numbers come from: a job of a server, or what a finished `longhaul run` left."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from jobs import client, errors, ids, places
from jobs.profile import gather


class StillRuns(errors.LonghaulError):
    """{job} is {status} ({done} of {total} requests): a report is of a job that has ended.
    Look at it live on {page}, or wait with 'longhaul watch {job}'."""


class ResultsGone(errors.LonghaulError):
    """The results of {job} have expired or were deleted, and its figures with them: no report can be made."""


class NoRun(errors.LonghaulError):
    """{path} is not there. Give the id of a job, or the output of a 'longhaul run' that has finished."""


class Unreadable(errors.LonghaulError):
    """{path} is not what Longhaul wrote: {reason}. Run 'longhaul run' again, or take another file."""


@dataclass(frozen=True)
class Subject:
    """What a report is about. `facts` are said of it in its head: name and text."""

    name: str
    status: str
    facts: dict[str, str]
    summary: dict[str, Any]
    figures: gather.Figures
    total: int
    completed: int
    failed: int


def of_job(api: client.Client, batch: client.Batch) -> Subject:
    """Fetch the figures of an ended job; raises StillRuns, ResultsGone."""
    counts, profile = batch.request_counts, gather.Profile()
    if not batch.ended:
        page = f"{api.url}/#/job/{batch.id}"
        raise StillRuns(job=batch.id, status=batch.status, done=batch.done, total=counts.total, page=page)
    summary: dict[str, Any] = {}
    with readable(f"what {api.url} answers for {batch.id}"):
        if batch.status != "failed":  # else it never ran: only the errors of its input are known
            summary = _summary(b"".join(_file(api, batch.id, "summary")), batch.id)
            _metrics(profile, _lines(_file(api, batch.id, "metrics")))
            _errors(profile, _lines(_file(api, batch.id, "errors")))
    for fault in batch.errors.data if batch.errors else ():
        profile.errors.add(fault.code, fault.message, f"line {fault.line}" if fault.line else "the file")
    facts = {
        "model": batch.model or "-",
        "endpoint": batch.endpoint,
        "created": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(batch.created_at)),
    }
    with readable(f"the summary of {batch.id}"):
        found = profile.build().exactly(summary)
    return Subject(
        batch.id, batch.status, facts, summary, found, counts.total, counts.completed, counts.failed
    )


def of_run(output: Path) -> Subject:
    """Read what a finished `longhaul run` into `output` left beside it; raises NoRun, Unreadable."""
    if not output.name:
        raise NoRun(path=output)
    files, profile = places.of_job(output), gather.Profile()
    place = files["summary"]
    if not place.exists():
        raise NoRun(path=place)
    with readable(place):
        summary = _summary(place.read_bytes(), output.name)
        counts = summary["counts"]
        total, completed, failed = counts["total"], counts["completed"], counts["failed"]
    for kind, take in (("metrics", _metrics), ("errors", _errors)):
        path = files[kind]
        if path.exists():
            with readable(path), path.open("rb") as stream:
                take(profile, stream)
    name = os.fsencode(output.name).decode(errors="replace")  # bytes that are no UTF-8 name a file, too
    with readable(place):
        figures = profile.build().exactly(summary)
    return Subject(name, "completed", {}, summary, figures, total, completed, failed)


def _summary(data: bytes, name: str) -> dict[str, Any]:
    if not data:
        raise ResultsGone(job=name)
    return dict(orjson.loads(data))


def _file(api: client.Client, job_id: str, kind: str) -> Iterator[bytes]:
    """Yield the bytes of a job's file; a kind without a line has none."""
    try:
        yield from api.content(ids.result_file_id(job_id, kind))
    except client.ServerRefused as error:
        if error.status != 404:
            raise


def _metrics(profile: gather.Profile, lines: Iterable[bytes]) -> None:
    for line in lines:
        profile.add_metrics(orjson.loads(line))


def _errors(profile: gather.Profile, lines: Iterable[bytes]) -> None:
    for line in lines:
        profile.add_error(orjson.loads(line))


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


@contextlib.contextmanager
def readable(path: object) -> Iterator[None]:
    """Say which file it is when what is in it cannot be understood; raises Unreadable."""
    try:
        yield
    except orjson.JSONDecodeError as error:
        raise Unreadable(path=path, reason=error.msg) from None
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise Unreadable(path=path, reason=f"{type(error).__name__}: {error}") from None
    except OSError as error:
        raise Unreadable(path=path, reason=error.strerror or error) from None
