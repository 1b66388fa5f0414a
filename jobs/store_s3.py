"""The store in a bucket of S3 or of a server that speaks its protocol."""

import io
import logging
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from jobs import errors, ids, store
from jobs.metrics import shared
from jobs.settings import Settings
from jobs.store_s3_calls import ATTEMPTS, Calls, Reply, connect
from jobs.store_s3_streams import PART_BYTES, Reader, Upload, ranged

log = logging.getLogger(__name__)

HURRY_SECONDS = 10.0
"""In a hurry, a silent call has failed after so long, and after so long none is made again."""
_BUFFER_BYTES = 256 << 10
_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(/(?P<prefix>.*))?")
_TAKEN_OR_IN_FLUX = (409, 412)
_CONDITION_NOT_KNOWN = (400, 405, 501)
_NOT_LISTED = (400, 403, 405, 501)
_FIRST_KEYS = 200
"""Of a listing with an end the first answer has so many: what lies behind the end is read in vain."""


class S3Store:
    """An ObjectStore below a prefix of a bucket; one client, safe for threads, create one a process."""

    def __init__(self, settings: Settings, hurried: bool = False) -> None:
        bucket, self._prefix = bucket_and_prefix(settings.store_url)
        self.url = f"s3://{bucket}/{self._prefix}".rstrip("/")
        self._settings, self._bucket = settings, bucket
        patience = HURRY_SECONDS if hurried else math.inf
        client = connect(settings, connect_seconds=5, read_seconds=min(settings.s3_timeout_seconds, patience))
        self._calls = Calls(client, bucket, self.url, patience_seconds=patience)
        self._conditions_known = True
        self._uploads_known = True

    @shared.store_put.time()
    def put(self, key: str, data: bytes | BinaryIO) -> int:
        if isinstance(data, bytes):
            self._calls("put_object", Key=self._key(key), Body=data)
            return len(data)
        with self.writer(key) as out:
            shutil.copyfileobj(data, out, PART_BYTES)
            return out.size

    def put_new(self, key: str, data: bytes) -> bool:
        # Asked first because some servers take If-None-Match and ignore it: there, only a race can overwrite.
        if self._head(key) is not None:
            return False
        if not self._conditions_known:
            self.put(key, data)
            return True
        mark = ids.ulid()
        for attempt in range(1, ATTEMPTS + 1):
            reply = self._calls(
                "put_object",
                accept=_TAKEN_OR_IN_FLUX + _CONDITION_NOT_KNOWN,
                Key=self._key(key),
                Body=data,
                IfNoneMatch="*",
                Metadata={"mark": mark},
            )
            if reply.ok:
                return True
            if reply.status in _CONDITION_NOT_KNOWN:
                return self._put_without_condition(key, data, reply)
            # A try whose answer was lost may have written the object: then it is taken, by this very call.
            found = self._head(key)
            if found is not None:
                return found.mark == mark
            if attempt < ATTEMPTS:
                self._calls.back_off(
                    attempt, "put_new", key, f"the server answered {reply.status} {reply.code}"
                )
        raise self._calls.unreachable(f"the server keeps answering {reply.status} {reply.code}", key)

    def get(self, key: str) -> bytes:
        with self.open(key) as file:
            return b"".join(iter(lambda: file.read(PART_BYTES), b""))

    def open(self, key: str, start: int = 0) -> BinaryIO:
        only: dict[str, Any] = {"Range": f"bytes={start}-"} if start else {}
        reply = self._calls("get_object", accept=(404, 416), Key=self._key(key), **only)
        if reply.status == 404:
            if reply.code == "NoSuchBucket":
                raise self._calls.unreachable(f"bucket {self._bucket!r} does not exist", key)
            raise errors.NotFound(what="object", id=key)
        if reply.status == 416:
            return io.BytesIO()
        if start:
            ranged(self._calls, key, reply)
        raw = Reader(self._calls, self._key(key), reply, start)
        return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))

    def size(self, key: str) -> int | None:
        reply = self._head(key)
        return None if reply is None else int(reply.fields["ContentLength"])

    def list(self, prefix: str, after: str = "", before: str = "") -> Iterator[store.Object]:
        return self._list(self._prefix + store.checked_prefix(prefix), after, before)

    def delete(self, key: str) -> None:
        # One at a time: some servers have no multi-object delete.
        self._calls("delete_object", accept=(404,), Key=self._key(key))

    @contextmanager
    def writer(self, key: str) -> Iterator[Upload]:
        upload = Upload(self._calls, self._key(key))
        try:
            yield upload
            upload.commit()
        except BaseException:
            upload.abort()
            raise

    def clean(self, before: float, dry_run: bool = False) -> Iterator[int]:
        for folder in store.STREAMED:
            for upload in self._uploads(self._prefix + folder):
                if upload["Initiated"].timestamp() >= before:
                    continue
                named = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                parts = self._calls("list_parts", accept=(404,), **named).fields.get("Parts", ())
                if not dry_run:
                    self._calls("abort_multipart_upload", accept=(404,), **named)
                yield sum(part["Size"] for part in parts)

    def check(self) -> None:
        # A client of its own: whoever asks wants an answer now, not after all the retries of real work.
        client = connect(self._settings, connect_seconds=2, read_seconds=2)
        try:
            Calls(client, self._bucket, self.url, attempts=2)(
                "list_objects_v2", Prefix=self._prefix, MaxKeys=1
            )
        finally:
            client.close()

    def _key(self, key: str) -> str:
        return self._prefix + store.checked_key(key)

    def _head(self, key: str) -> Reply | None:
        reply = self._calls("head_object", accept=(404,), Key=self._key(key))
        return reply if reply.ok else None

    def _put_without_condition(self, key: str, data: bytes, refused: Reply) -> bool:
        self.put(key, data)  # raises if it was not the condition that the server refused
        self._conditions_known = False
        extra = {"store": self.url, "status": refused.status, "code": refused.code}
        log.warning("no conditional writes, two racing creators may both succeed", extra=extra)
        return True

    def _uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Yield the multipart uploads that nobody has completed; nothing where the server cannot tell."""
        more: dict[str, Any] = {}
        while True:
            page = self._calls("list_multipart_uploads", accept=_NOT_LISTED, Prefix=prefix, **more)
            if not page.ok:
                if self._uploads_known:
                    log.warning(
                        "multipart uploads cannot be listed, the bucket's lifecycle rule has to end them",
                        extra={"store": self.url, "status": page.status, "code": page.code},
                    )
                self._uploads_known = False
                return
            found = page.fields.get("Uploads", [])
            yield from found
            if not page.fields.get("IsTruncated") or not found:
                return
            more = {"KeyMarker": found[-1]["Key"], "UploadIdMarker": found[-1]["UploadId"]}

    def _list(self, prefix: str, after: str, before: str) -> Iterator[store.Object]:
        more: dict[str, Any] = {"StartAfter": self._key(after)} if after else {}
        if before:
            more["MaxKeys"] = _FIRST_KEYS
        while True:
            page = self._calls("list_objects_v2", Prefix=prefix, **more).fields
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                if before and key >= before:  # keys come in their order
                    return
                yield store.Object(key, item["Size"], item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Return what an s3:// URL names: bucket, and prefix with its slash. Raises SettingsError."""
    match = _URL.fullmatch(url)
    if match is None:  # not repeated here: keys do not belong into it, but may stand there
        raise errors.SettingsError("LONGHAUL_STORE_URL is not of the form s3://bucket[/prefix].")
    prefix = (match["prefix"] or "").strip("/")
    return match["bucket"], store.checked_key(prefix) + "/" if prefix else ""
