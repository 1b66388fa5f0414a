"""Whether the store does what is asked of one: write, read, list, remove, and write only what is new."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from jobs import errors, ids, store
from jobs.doctor_findings import Finding, Look
from jobs.doctor_redis import skew
from jobs.settings import Settings

_look = Look("store")
_SECONDS = 5.0
_FREE_BYTES = 1 << 30
_SLOW_SECONDS = 0.5
_DENIED = "Let these keys read, write, list and remove in the bucket, or below its prefix."
_ADVICE = {
    "access denied": _DENIED,
    "does not exist": "Make the bucket, or name another in LONGHAUL_STORE_URL.",
    "access key id": "Correct LONGHAUL_S3_ACCESS_KEY_ID, and the secret that goes with it.",
    "secret access key": "Correct LONGHAUL_S3_SECRET_ACCESS_KEY.",
    "no access key": "Set LONGHAUL_S3_ACCESS_KEY_ID and LONGHAUL_S3_SECRET_ACCESS_KEY.",
    "no answer": "Start it, or correct LONGHAUL_S3_ENDPOINT_URL.",
    "closed the connection": "See its log, and what stands between.",
    "the server answered": "Is LONGHAUL_S3_ENDPOINT_URL that of an S3 store? See its log.",
    "Permission denied": "Let this user write there, or name another place in LONGHAUL_STORE_URL.",
    "Read-only": "Name another place in LONGHAUL_STORE_URL.",
    "Not a directory": "Name another place in LONGHAUL_STORE_URL.",
    "No space": "Make room there: 'longhaul sweep', 'longhaul delete', or a larger disk.",
}
"""What to do, by words of the reason."""


def check(settings: Settings) -> Iterator[Finding]:
    """Look at the store of the settings. What is written is removed again."""
    if "LONGHAUL_STORE_URL" not in os.environ:
        advice = "Set it on machines that run servers, or say --dir."
        yield _look.unchecked("access", "LONGHAUL_STORE_URL is not set", advice)
        return
    opened = store.open_store(settings, hurried=True)
    try:
        opened.check()
    except errors.StoreUnreachable as error:
        advice = _advice(str(error.values["reason"]), "Correct LONGHAUL_STORE_URL.")
        yield _look.wrong("access", f"{opened.url}: {error.values['reason']}", advice)
        return
    key = f"doctor/{ids.ulid()}"
    try:
        yield from _used(opened, key)
        yield from _conditions(opened, settings, key)
        yield from _place(settings)
    finally:
        for name in (key, f"{key}-new", f"{key}-parts"):
            with suppress(errors.LonghaulError):
                opened.delete(name)


def _used(opened: store.ObjectStore, key: str) -> Iterator[Finding]:
    """Go through all that is done with objects; what fails is told with the word for it."""
    step, began = "write", time.monotonic()
    try:
        opened.put(key, b"doctor")
        step = "read"
        with opened.open(key, 3) as end:
            whole = opened.get(key) == b"doctor" and end.read() == b"tor"
        step = "list"
        listed = [found.key for found in opened.list(key)] == [key]
        step = "write in parts"
        with opened.writer(f"{key}-parts") as out:
            out.write(b"parts" * 2_000_000)  # more than one part
        parts = opened.size(f"{key}-parts") == 10_000_000
        step = "remove"
        opened.delete(f"{key}-parts")
        opened.delete(key)
        gone = opened.size(key) is None
    except errors.LonghaulError as error:
        reason = str(error.values.get("reason", error))
        yield _look.wrong("access", f"{opened.url} does not {step}: {reason}", _advice(reason, _DENIED))
        return
    seconds = time.monotonic() - began
    faults = {"read what was written": whole, "list what was written": listed, "join parts": parts}
    for what, fine in (faults | {"remove": gone}).items():
        if not fine:
            yield _look.wrong("access", f"it does not {what}", "It is no store that Longhaul can use.")
    said = f"{opened.url} writes, reads, lists, joins parts and removes, in {seconds:.2f} s together"
    if seconds > 8 * _SLOW_SECONDS:
        yield _look.warning("access", said, "It is slow, and results go through it: have it nearer.")
    elif all(faults.values()) and gone:
        yield _look.ok("access", said)


def _conditions(opened: store.ObjectStore, settings: Settings, key: str) -> Iterator[Finding]:
    name = f"{key}-new"
    if not settings.store_url.startswith("s3://"):
        both = opened.put_new(name, b"1"), opened.put_new(name, b"2")
        if both != (True, False):
            yield _look.wrong("writes of what is new", str(both), "The file system must have hard links.")
        else:
            yield _look.ok("writes of what is new", "the second of two is refused")
        return
    yield from _s3(settings, name)


def _s3(settings: Settings, key: str) -> Iterator[Finding]:
    from jobs import store_s3, store_s3_calls

    bucket, prefix = store_s3.bucket_and_prefix(settings.store_url)
    client = store_s3_calls.connect(settings, connect_seconds=_SECONDS, read_seconds=_SECONDS)
    calls = store_s3_calls.Calls(client, bucket, settings.store_url, attempts=2)
    replies = [
        calls("put_object", accept=range(400, 502), Key=prefix + key, Body=b"new", IfNoneMatch="*")
        for _ in range(2)
    ]
    yield conditional(*(reply.status for reply in replies))
    yield _clock(replies[0].fields)
    listed = calls("list_multipart_uploads", accept=range(400, 502), Prefix=prefix + "files/")
    if not listed.ok:
        advice = "Give the bucket a lifecycle rule that ends multipart uploads: broken ones stay else."
        yield _look.warning("broken uploads", f"they cannot be listed: {listed.status} {listed.code}", advice)


def conditional(first: int, second: int) -> Finding:
    """Judge the HTTP statuses of two writes of one new object under the condition that there is none."""
    said = f"If-None-Match: the first write got {first}, the second {second}"
    if first < 300 and second in (409, 412):
        return _look.ok("conditional writes", said)
    advice = "Two racing creators may both succeed: one job may come twice. Use a store that has them."
    return _look.warning("conditional writes", said, advice)


def _clock(fields: dict[str, Any]) -> Finding:
    date = fields.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if not date:
        return _look.unchecked("clock", "it tells no time")
    return skew(_look, parsedate_to_datetime(date).timestamp() + 0.5 - time.time())


def _place(settings: Settings) -> Iterator[Finding]:
    scheme, _, rest = settings.store_url.partition("://")
    if scheme != "file":
        return
    if not Path(rest).is_absolute():
        advice = "Processes started elsewhere have another store: give an absolute path."
        yield _look.warning("place", f"{rest} is relative to where a process starts", advice)
    free = shutil.disk_usage(rest).free
    said = f"{free / 1e9:.1f} GB free in {rest}; for processes of one machine"
    if free < _FREE_BYTES:
        yield _look.warning("space", said, "Make room, or 'longhaul sweep' and 'longhaul delete'.")
    else:
        yield _look.ok("space", said)


def _advice(reason: str, otherwise: str) -> str:
    return next((advice for words, advice in _ADVICE.items() if words in reason), otherwise)
