"""Accept a new job: its input and record into the store, its markers, and only then the ledger."""

import hashlib
import io
import logging
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import orjson
import redis

from jobs import errors, ids
from jobs.batches import Batches
from jobs.creation import NewBatch, refusal, window_seconds
from jobs.files import Files, made_at, record_key
from jobs.ledger import Ledger
from jobs.quotas import Quotas
from jobs.records import FileRecord, JobRecord
from jobs.settings import Settings
from jobs.store import ObjectStore

log = logging.getLogger(__name__)
_LOOKS, _LOOK_SECONDS = 5, 0.1
REDIS_AWAY = (redis.ConnectionError, redis.TimeoutError, redis.OutOfMemoryError)


class Acceptor:
    """Makes jobs, one for each Idempotency-Key of a tenant."""

    def __init__(
        self,
        settings: Settings,
        store: ObjectStore,
        ledger: Ledger,
        files: Files,
        batches: Batches,
        quotas: Quotas,
    ) -> None:
        self.settings, self.store, self.ledger = settings, store, ledger
        self.files, self.batches, self.quotas = files, batches, quotas
        self._waiting: deque[JobRecord] = deque()

    def create(
        self, tenant: str, new: NewBatch, key: str | None, digest: str, traceparent: str | None = None
    ) -> JobRecord:
        """Return the job of this request, made now or by an earlier send of the same request.

        `key` is the Idempotency-Key, `digest` the sha256 of the request's canonical JSON, `traceparent` the
        client's span. The record of the
        key names the job before anything of the job exists, and every step can be repeated: whichever of
        several equal requests comes through, wherever the others broke off, there is one job in the end.

        Raises InvalidRequest, Conflict (the key was used for another body), QuotaExceeded, Unavailable.
        """
        try:
            return self._create(tenant, new, key, digest, traceparent)
        except errors.QuotaExceeded:
            # Equal requests at once take the room from each other: one of them may have the key by now.
            if key is None or not self._is_claimed_soon(tenant, key, digest):
                raise
        return self._create(tenant, new, key, digest, traceparent)

    def _create(
        self, tenant: str, new: NewBatch, key: str | None, digest: str, traceparent: str | None
    ) -> JobRecord:
        job_id = self._claimed(tenant, key, digest) if key else None
        record = self.batches.find(job_id) if job_id else None
        if record is None:
            given = self._input(tenant, new)
            self.ledger.ping()
            # All quotas are asked before anything is stored: what is refused leaves neither key nor place.
            with self._room(tenant, key, job_id, given):
                job_id = self._let_in(tenant, key, digest, job_id, given)
                record = self._write_record(tenant, new, job_id, key, given, traceparent)
        self._open(record, retried=key is not None)
        return record

    def enter_waiting(self) -> None:
        """Enter the jobs in the ledger that were accepted while Redis was away."""
        while self._waiting:
            self.ledger.create(self._waiting[0])
            self._waiting.popleft()

    def _claimed(self, tenant: str, key: str, digest: str) -> str | None:
        try:
            found = orjson.loads(self.store.get(_idempotency_key(tenant, key)))
        except errors.NotFound:
            return None
        if found["request_sha256"] != digest:
            raise errors.Conflict(
                f"Idempotency-Key {key!r:.100} was used before with another body.", param="Idempotency-Key"
            )
        return str(found["job_id"])

    def _let_in(self, tenant: str, key: str | None, digest: str, job_id: str | None, given: "_Input") -> str:
        """Return the job's id, which its quota is reserved for: nothing was stored if that is refused."""
        mine = job_id or ids.batch_id()
        self.quotas.reserve(tenant, mine, given.requests, given.size)
        job_id = job_id or self._claim(tenant, key, digest, mine)
        if job_id != mine:
            self.quotas.give_back(tenant, mine)
        return job_id

    def _is_claimed_soon(self, tenant: str, key: str, digest: str) -> bool:
        for _ in range(_LOOKS):
            if self._claimed(tenant, key, digest) is not None:
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _room(
        self, tenant: str, key: str | None, job_id: str | None, given: "_Input"
    ) -> AbstractContextManager[None]:
        """Keep room for an input that was given inline, which an earlier try may have stored already."""
        if given.file is not None:
            return nullcontext()
        stored = ids.result_file_id(job_id, "input") if job_id else None
        return self.quotas.storing(tenant, given.size, key and _hash(key), stored)

    def _claim(self, tenant: str, key: str | None, digest: str, job_id: str) -> str:
        if key is None:
            return job_id
        record = orjson.dumps({"job_id": job_id, "request_sha256": digest})
        if self.store.put_new(_idempotency_key(tenant, key), record):
            return job_id
        return self._claimed(tenant, key, digest) or _vanished(key)

    def _input(self, tenant: str, new: NewBatch) -> "_Input":
        """Return what the job is to run, checked as far as that is possible without reading it."""
        if new.requests is not None:
            limit = self.settings.max_requests_per_job
            if len(new.requests) > limit:
                raise refusal(
                    f"requests holds {len(new.requests)} requests; "
                    f"the limit is {limit} (LONGHAUL_MAX_REQUESTS_PER_JOB).",
                    "requests",
                    "too_many_requests",
                )
            return _Input(data=self._inline(new.requests), lines=len(new.requests))
        file = self._file(tenant, new)
        if file.purpose != "batch":
            raise refusal(
                f"File {file.id} was uploaded with purpose {file.purpose!r}; a batch's input needs 'batch'.",
                "input_file_id",
            )
        return _Input(file=file)

    def _file(self, tenant: str, new: NewBatch) -> FileRecord:
        try:
            return self.files.get(tenant, str(new.input_file_id))
        except errors.NotFound as error:
            raise refusal(str(error), "input_file_id", "not_found") from None

    def _write_record(
        self,
        tenant: str,
        new: NewBatch,
        job_id: str,
        key: str | None,
        given: "_Input",
        traceparent: str | None,
    ) -> JobRecord:
        file = given.file or self._stored(tenant, job_id, given)
        now = made_at(job_id)
        record = JobRecord(
            id=job_id,
            tenant=tenant,
            endpoint=new.endpoint,
            input_file_id=file.id,
            input_key=file.key,
            completion_window=new.completion_window,
            created_at=now,
            expires_at=now + window_seconds(new.completion_window),
            metadata=new.metadata,
            priority=new.priority or 0,
            output_expires_seconds=new.output_expires_after.seconds if new.output_expires_after else None,
            traceparent=traceparent,
            idempotency=_idempotency_key(tenant, key) if key else None,
        )
        # Everything in it follows from the request and the id, so whoever else writes it writes the same.
        self.store.put_new(f"jobs/{job_id}/job.json", record.to_json())
        return record

    def _inline(self, requests: list[dict[str, object]]) -> bytes:
        data = b"".join(orjson.dumps(request) + b"\n" for request in requests)
        limit = self.settings.max_file_bytes
        if len(data) > limit:
            raise errors.TooLarge(
                what="requests", limit=limit, setting="LONGHAUL_MAX_FILE_BYTES", param="requests"
            )
        return data

    def _stored(self, tenant: str, job_id: str, given: "_Input") -> FileRecord:
        """Make a file of requests that were given inline."""
        file_id = ids.result_file_id(job_id, "input")
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            filename="requests.jsonl",
            purpose="batch",
            bytes=given.size,
            created_at=int(made_at(job_id)),
            key=f"files/{file_id}",
            lines=given.lines,
        )
        self.store.put(record.key, io.BytesIO(given.data))
        self.store.put(record_key(tenant, file_id), record.to_json())
        return record

    def _open(self, record: JobRecord, retried: bool) -> None:
        if retried and self._is_made(record):
            return
        self.store.put(f"job-index/{record.tenant}/{record.id}", b"")
        self.store.put(f"open/{record.id}", b"")
        try:
            self.ledger.create(record)
        except REDIS_AWAY:
            # Redis answered a moment ago. With a key, the client's retry completes this job. Without one it
            # would make a second job beside this one, which is stored: so it is accepted, and entered later.
            if retried:
                raise
            log.warning("job waits for redis", extra={"job": record.id})
            self._waiting.append(record)

    def _is_made(self, record: JobRecord) -> bool:
        job = self.ledger.job(record.id)
        try:
            return self.batches.ended(record, job) is not None or job is not None
        except errors.NotFound:
            # Not made again: its key is free, and the next create with it makes a job of its own.
            raise errors.Unavailable(
                "The batch of this Idempotency-Key was just deleted. Send it again."
            ) from None


@dataclass(frozen=True)
class _Input:
    """A job's requests: in a file, or as `data`, inline, with so many `lines`."""

    file: FileRecord | None = None
    data: bytes = b""
    lines: int = 0

    @property
    def size(self) -> int:
        return self.file.bytes if self.file else len(self.data)

    @property
    def requests(self) -> int:
        return (self.file.lines or 1) if self.file else self.lines


def digest(body: object) -> str:
    """Return the sha256 of a request's canonical JSON: the order of its keys does not count."""
    try:
        return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
    except TypeError:
        raise refusal("The body is nested too deeply.", None, "invalid_json") from None


def _idempotency_key(tenant: str, key: str) -> str:
    return f"idempotency/{tenant}/{_hash(key)}.json"


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _vanished(key: str) -> NoReturn:
    raise errors.Unavailable(f"The record of Idempotency-Key {key!r:.100} is gone. Send it again.")
