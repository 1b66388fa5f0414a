"""Reading and writing objects of any size through S3, with one buffer in memory."""

import io
import logging
from typing import Any

from jobs import ids
from jobs.store_s3_calls import ATTEMPTS, BROKEN, Calls, Reply

log = logging.getLogger(__name__)

PART_BYTES = 8 << 20


class Reader(io.RawIOBase):
    """The bytes of one object from a position on. A connection that breaks is opened again where it broke."""

    def __init__(self, calls: Calls, key: str, reply: Reply, start: int) -> None:
        self._calls, self._key = calls, key
        self._body: Any = reply.fields["Body"]
        self._etag: str = reply.fields["ETag"]
        self._position = start
        self._end = start + int(reply.fields["ContentLength"])
        self._failures = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while self._position < self._end:
            failure: Exception | str
            try:
                data = self._body.read(len(buffer))
                failure = "the connection was closed early"
            except BROKEN as error:
                data, failure = b"", error
            if data:
                buffer[: len(data)] = data
                self._position += len(data)
                self._failures = 0
                return len(data)
            self._resume(failure)
        return 0

    def close(self) -> None:
        if not self.closed:
            self._body.close()
        super().close()

    def _resume(self, failure: Exception | str) -> None:
        self._failures += 1
        if self._failures == ATTEMPTS:
            raise self._calls.unreachable(failure, self._key) from None
        self._body.close()
        self._calls.back_off(self._failures, "read", self._key, failure)
        reply = self._calls(
            "get_object",
            accept=(404, 412, 416),
            Key=self._key,
            Range=f"bytes={self._position}-",
            IfMatch=self._etag,  # half of one object and half of another is neither
        )
        if not reply.ok:
            raise self._calls.unreachable("the object was replaced while it was read", self._key)
        self._body = ranged(self._calls, self._key, reply).fields["Body"]


class Upload:
    """Bytes on their way into one object: one call if they are few, else a multipart upload."""

    def __init__(self, calls: Calls, key: str) -> None:
        self._calls, self._key = calls, key
        self._buffer = bytearray()
        self._etags: list[str] = []
        self._upload_id: str | None = None
        self._mark = ids.ulid()
        self.size = 0

    def write(self, data: bytes, /) -> int:
        for start in range(0, len(data), PART_BYTES):
            self._buffer += data[start : start + PART_BYTES]
            if len(self._buffer) >= PART_BYTES:
                self._send_part(PART_BYTES)
        self.size += len(data)
        return len(data)

    def commit(self) -> None:
        """Send what is left and make the object visible."""
        if self._upload_id is None:
            self._calls("put_object", Key=self._key, Body=bytes(self._buffer))
            return
        if self._buffer:
            self._send_part(len(self._buffer))
        parts = [{"ETag": etag, "PartNumber": number} for number, etag in enumerate(self._etags, 1)]
        reply = self._calls(
            "complete_multipart_upload",
            accept=(404,),
            Key=self._key,
            UploadId=self._upload_id,
            MultipartUpload={"Parts": parts},
        )
        # The upload is also gone if an earlier try completed it and only the answer was lost.
        if not reply.ok and self._calls("head_object", accept=(404,), Key=self._key).mark != self._mark:
            raise self._calls.unreachable("the multipart upload was aborted by the server", self._key)

    def abort(self) -> None:
        """Throw away what was sent; where that fails too, the bucket's lifecycle rule for uploads has to."""
        if self._upload_id is None:
            return
        try:
            self._calls("abort_multipart_upload", accept=(404,), Key=self._key, UploadId=self._upload_id)
        except Exception as error:  # the failure that led here is the one to report
            log.warning("multipart upload not aborted", extra={"key": self._key, "reason": error})

    def _send_part(self, size: int) -> None:
        if self._upload_id is None:
            created = self._calls("create_multipart_upload", Key=self._key, Metadata={"mark": self._mark})
            self._upload_id = created.fields["UploadId"]
        reply = self._calls(
            "upload_part",
            Key=self._key,
            UploadId=self._upload_id,
            PartNumber=len(self._etags) + 1,
            Body=bytes(memoryview(self._buffer)[:size]),
        )
        self._etags.append(reply.fields["ETag"])
        del self._buffer[:size]


def ranged(calls: Calls, key: str, reply: Reply) -> Reply:
    """Return the reply to a ranged get, if it is one: a server that ignores Range sends other bytes."""
    if reply.status != 206:
        raise calls.unreachable(f"the server ignores Range and answered {reply.status}", key)
    return reply
