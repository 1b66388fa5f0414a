"""The life of a job as its user sees it: create, look, list, cancel. The store is written before Redis."""

import hashlib
import io
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import orjson
import redis

from jobs import errors, ids, schema, views
from jobs.creation import NewBatch, refusal, window_seconds
from jobs.files import Files, made_at, record_key
from jobs.ledger import Job, Ledger, State
from jobs.memo import Memo
from jobs.records import FileRecord, JobRecord, Manifest
from jobs.settings import Settings
from jobs.store import ObjectStore

log = logging.getLogger(__name__)
_READERS = 16
_REMEMBERED = 20_000


class Batches:
    """Jobs of all tenants; every method takes the tenant and answers NotFound for a job of another."""

    def __init__(self, settings: Settings, store: ObjectStore, ledger: Ledger, files: Files) -> None:
        self.settings = settings
        self.store = store
        self.ledger = ledger
        self.files = files
        self._record = Memo(self._read_record, _REMEMBERED)

    # create

    def create(self, tenant: str, new: NewBatch, key: str | None, digest: str) -> JobRecord:
        """Return the job of this request, made now or by an earlier send of the same request.

        `key` is the Idempotency-Key, `digest` the sha256 of the request's canonical JSON. The record of the
        key names the job before anything of the job exists, and every step can be repeated: whichever of
        several equal requests comes through, wherever the others broke off, there is one job in the end.

        Raises InvalidRequest, Conflict (the key was used for another body), Unavailable.
        """
        job_id = self._claimed(tenant, key, digest) if key else None
        record = self.find(job_id) if job_id else None
        if record is None:
            self._check_requests(tenant, new)
            self.ledger.ping()
            job_id = job_id or self._claim(tenant, key, digest)
            record = self._write_record(tenant, new, job_id)
        self._open(record, retried=key is not None)
        return record

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

    def _claim(self, tenant: str, key: str | None, digest: str) -> str:
        job_id = ids.batch_id()
        if key is None:
            return job_id
        record = orjson.dumps({"job_id": job_id, "request_sha256": digest})
        if self.store.put_new(_idempotency_key(tenant, key), record):
            return job_id
        return self._claimed(tenant, key, digest) or _vanished(key)

    def _check_requests(self, tenant: str, new: NewBatch) -> None:
        if new.requests is not None:
            limit = self.settings.max_requests_per_job
            if len(new.requests) > limit:
                raise refusal(
                    f"requests holds {len(new.requests)} requests; "
                    f"the limit is {limit} (LONGHAUL_MAX_REQUESTS_PER_JOB).",
                    "requests",
                    "too_many_requests",
                )
            return
        assert new.input_file_id is not None
        try:
            file = self.files.get(tenant, new.input_file_id)
        except errors.NotFound as error:
            raise refusal(str(error), "input_file_id", "not_found") from None
        if file.purpose != "batch":
            raise refusal(
                f"File {file.id} was uploaded with purpose {file.purpose!r}; a batch's input needs 'batch'.",
                "input_file_id",
            )

    def _write_record(self, tenant: str, new: NewBatch, job_id: str) -> JobRecord:
        file = self._input(tenant, new, job_id)
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
        )
        self.store.put_new(f"jobs/{job_id}/job.json", record.to_json())
        return record

    def _input(self, tenant: str, new: NewBatch, job_id: str) -> FileRecord:
        if new.requests is None:
            assert new.input_file_id is not None
            return self.files.get(tenant, new.input_file_id)
        data = b"".join(orjson.dumps(request) + b"\n" for request in new.requests)
        if len(data) > self.settings.max_file_bytes:
            raise errors.TooLarge(
                what="requests",
                limit=self.settings.max_file_bytes,
                setting="LONGHAUL_MAX_FILE_BYTES",
                param="requests",
            )
        file_id = ids.result_file_id(job_id, "input")
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            filename="requests.jsonl",
            purpose="batch",
            bytes=len(data),
            created_at=int(made_at(job_id)),
            key=f"files/{file_id}",
        )
        self.store.put(record.key, io.BytesIO(data))
        self.store.put(record_key(tenant, file_id), record.to_json())
        return record

    def _open(self, record: JobRecord, retried: bool) -> None:
        if self.ledger.job(record.id) is not None or self.manifest(record.id) is not None:
            return
        self.store.put(f"job-index/{record.tenant}/{record.id}", b"")
        self.store.put(f"open/{record.id}", b"")
        try:
            self.ledger.create(record)
        except (redis.ConnectionError, redis.TimeoutError, redis.OutOfMemoryError):
            # Redis answered a moment ago. With a key, the client's retry completes this job. Without one it
            # would make a second job, while recovery runs this one too: it is stored, so it is accepted.
            if retried:
                raise
            log.warning("job waits for recovery", extra={"job": record.id})

    # look

    def find(self, job_id: str) -> JobRecord | None:
        """Return a job's record, whoever's it is."""
        return self._record(job_id) if _is_batch_id(job_id) else None

    def record(self, tenant: str, job_id: str) -> JobRecord:
        """Return the record of the tenant's job; raise NotFound."""
        record = self.find(job_id)
        if record is None or record.tenant != tenant:
            raise errors.NotFound(what="batch", id=job_id[:100])
        return record

    def get(self, tenant: str, job_id: str) -> schema.Batch:
        """Return the Batch of the tenant's job; raise NotFound."""
        record = self.record(tenant, job_id)
        return self._view(record, self.ledger.job(job_id))

    def page(self, tenant: str, limit: int, after: str | None) -> tuple[list[schema.Batch], bool]:
        """Return up to `limit` Batches behind `after`, newest first, and whether there are more."""
        if after is not None and not _is_batch_id(after):
            raise refusal(f"after must be the id of a batch, not {after!r:.80}.", "after")
        prefix = f"job-index/{tenant}/"
        names = sorted((found.key.removeprefix(prefix) for found in self.store.list(prefix)), reverse=True)
        if after is not None:
            names = [name for name in names if name < after]
        shown = names[:limit]
        return self._views(tenant, shown), len(names) > limit

    def shown(self, record: JobRecord) -> schema.Batch:
        """Return the Batch of a job that was accepted just now, even if Redis went away since."""
        try:
            return self._view(record, self.ledger.job(record.id))
        except (redis.RedisError, errors.RedisUnreachable):
            return views.batch(record, None, None, False)

    def manifest(self, job_id: str) -> Manifest | None:
        """Return how a job ended, or None while it has not."""
        try:
            return Manifest.from_json(self.store.get(f"jobs/{job_id}/manifest.json"))
        except errors.NotFound:
            return None

    def _views(self, tenant: str, names: Sequence[str]) -> list[schema.Batch]:
        if not names:
            return []
        jobs = self.ledger.jobs(list(names))

        def view(name: str, job: Job | None) -> schema.Batch | None:
            record = self.find(name)
            return self._view(record, job) if record is not None and record.tenant == tenant else None

        with ThreadPoolExecutor(_READERS) as pool:
            return [batch for batch in pool.map(view, names, jobs) if batch is not None]

    def _view(self, record: JobRecord, job: Job | None) -> schema.Batch:
        if job is not None and job.state.value not in views.TERMINAL:
            return views.batch(record, job, None, False)
        manifest = self.manifest(record.id)
        cancelled = job is None and manifest is None and self._cancel_accepted(record.id)
        return views.batch(record, job, manifest, cancelled)

    # cancel

    def cancel(self, tenant: str, job_id: str) -> schema.Batch:
        """Accept the cancellation of the tenant's job; raise NotFound, or Conflict when it is too late.

        The marker is written before the ledger hears of it: a cancellation once accepted outlives Redis.
        """
        record = self.record(tenant, job_id)
        before = self.get(tenant, job_id)
        if before.status in ("cancelling", "cancelled"):
            return before
        if before.status not in ("validating", "in_progress"):
            raise _too_late(before.status)
        self.store.put(_cancelled_key(job_id), b"")
        state = self.ledger.cancel(job_id)
        if state not in (None, State.CANCELLING, State.CANCELLED):
            # It moved on in between: what was refused must not come true when Redis is rebuilt.
            self.store.delete(_cancelled_key(job_id))
            raise _too_late(str(state))
        return self._view(record, self.ledger.job(job_id))

    def reads_open_job(self, file: FileRecord) -> bool:
        """Tell whether an unfinished job has this file as its input."""
        open_ids = [found.key.removeprefix("open/") for found in self.store.list("open/")]
        with ThreadPoolExecutor(_READERS) as pool:
            records = pool.map(self.find, open_ids)
            return any(record is not None and record.input_key == file.key for record in records)

    def _cancel_accepted(self, job_id: str) -> bool:
        return self.store.size(_cancelled_key(job_id)) is not None

    def _read_record(self, job_id: str) -> JobRecord | None:
        try:
            return JobRecord.from_json(self.store.get(f"jobs/{job_id}/job.json"))
        except errors.NotFound:
            return None


def digest(body: object) -> str:
    """Return the sha256 of a request's canonical JSON: the order of its keys does not count."""
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _is_batch_id(text: str) -> bool:
    return text.startswith("batch_") and ids.is_id(text)


def _idempotency_key(tenant: str, key: str) -> str:
    return f"idempotency/{tenant}/{hashlib.sha256(key.encode()).hexdigest()}.json"


def _cancelled_key(job_id: str) -> str:
    return f"jobs/{job_id}/cancelled"


def _too_late(status: str) -> errors.Conflict:
    return errors.Conflict(f"A batch that is {status} cannot be cancelled.")


def _vanished(key: str) -> NoReturn:
    raise errors.Unavailable(f"The record of Idempotency-Key {key!r:.100} is gone. Send it again.")
