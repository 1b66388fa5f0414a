"""Jobs as their user sees them: look, list, cancel, delete."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import redis

from jobs import deletion, errors, ids, index, schema, views
from jobs.creation import refusal
from jobs.ledger import Job, Ledger, State
from jobs.memo import Memo
from jobs.records import FileRecord, JobRecord, Manifest
from jobs.store import ObjectStore

_READERS = 16
_REMEMBERED = 20_000


class Batches:
    """Jobs of all tenants; every method takes the tenant and answers NotFound for a job of another."""

    def __init__(self, store: ObjectStore, ledger: Ledger) -> None:
        self.store, self.ledger = store, ledger
        self._record = Memo(self._read_record, _REMEMBERED)

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
        found: list[schema.Batch] = []
        while True:
            wanted = limit - len(found)
            names = index.newest(self.store, tenant, wanted + 1, after)
            found += self._views(tenant, names[:wanted])
            # A page that has a next one is full: of one that is empty nobody could go on behind the last.
            if len(found) == limit or len(names) <= wanted:
                return found, len(names) > wanted
            after = names[wanted - 1]

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

    def ended(self, record: JobRecord, job: Job | None) -> Manifest | None:
        """Return how a job ended, None while it has not; raise NotFound when it was deleted since."""
        if job is not None and job.state.value not in views.TERMINAL:
            return None
        manifest = self.manifest(record.id)
        if manifest is None and self.store.size(f"jobs/{record.id}/job.json") is None:
            self._record.forget(record.id)
            raise errors.NotFound(what="batch", id=record.id)
        return manifest

    def _views(self, tenant: str, names: Sequence[str]) -> list[schema.Batch]:
        if not names:
            return []
        jobs = self.ledger.jobs(list(names))

        def view(name: str, job: Job | None) -> schema.Batch | None:
            record = self.find(name)
            try:
                return self._view(record, job) if record is not None and record.tenant == tenant else None
            except errors.NotFound:  # deleted since it was listed
                return None

        with ThreadPoolExecutor(_READERS) as pool:
            return [batch for batch in pool.map(view, names, jobs) if batch is not None]

    def _view(self, record: JobRecord, job: Job | None) -> schema.Batch:
        manifest = self.ended(record, job)
        if job is None and manifest is not None and self._ends(record.id):
            return views.ending(record, manifest)
        cancelled = job is None and manifest is None and self._cancel_accepted(record.id)
        return views.batch(record, job, manifest, cancelled)

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

    def delete(self, tenant: str, job_id: str) -> None:
        """Delete the tenant's ended job and all that it made; raise NotFound, or Conflict before its end.

        One that broke off is finished by the next call, or by the sweep.
        """
        record = deletion.begun(self.store, job_id) if _is_batch_id(job_id) else None
        if record is None or record.tenant != tenant:
            record = self.record(tenant, job_id)
            if (status := self.get(tenant, job_id).status) not in views.TERMINAL:
                raise errors.Conflict(f"A batch that is {status} cannot be deleted: cancel it first.")
            deletion.begin(self.store, record)
        removed = deletion.purge(self.store, record)
        self._record.forget(job_id)
        if not removed:
            raise errors.NotFound(what="batch", id=job_id)

    def reads_open_job(self, file: FileRecord) -> bool:
        """Tell whether an unfinished job has this file as its input."""
        open_ids = [found.key.removeprefix("open/") for found in self.store.list("open/")]
        with ThreadPoolExecutor(_READERS) as pool:
            records = pool.map(self.find, open_ids)
            return any(record is not None and record.input_key == file.key for record in records)

    def _ends(self, job_id: str) -> bool:
        # Redis forgot it between its manifest and the records of its files, which recovery will write.
        return self.store.size(f"open/{job_id}") is not None

    def _cancel_accepted(self, job_id: str) -> bool:
        return self.store.size(_cancelled_key(job_id)) is not None

    def _read_record(self, job_id: str) -> JobRecord | None:
        try:
            return JobRecord.from_json(self.store.get(f"jobs/{job_id}/job.json"))
        except errors.NotFound:
            return None


def _is_batch_id(text: str) -> bool:
    return text.startswith("batch_") and ids.is_id(text)


def _cancelled_key(job_id: str) -> str:
    return f"jobs/{job_id}/cancelled"


def _too_late(status: str) -> errors.Conflict:
    return errors.Conflict(f"A batch that is {status} cannot be cancelled.")
