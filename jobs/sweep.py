"""The sweep: remove from the store what nobody will read again.

What an unfinished job needs is never touched: `open/` tells which those are. An age is counted from the
later of an object's own time and the time in its id, so that what is being made at the moment is young. All
steps may be repeated and may break off: markers are removed last. Two sweeps at once do each other no harm.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import orjson

from jobs import deletion, errors, finalize, ids, results
from jobs.files import made_at, record_key
from jobs.records import JobRecord, Manifest
from jobs.scratch import Scratch
from jobs.store import Object, ObjectStore

HOUR, DAY = 3600.0, 86_400.0
_PAUSE_EVERY = 200
_UPLOADS = "CREATE TABLE uploads (id TEXT PRIMARY KEY) WITHOUT ROWID"


@dataclass
class Removed:
    """What a sweep removed (a dry run: would remove): objects and their bytes, by kind."""

    objects: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, size: int) -> None:
        self.objects[kind] += 1
        self.bytes[kind] += size


class Sweep:
    """One sweep of a store.

    everything   look at every job and Idempotency-Key, not only at what ended or broke off in the last days
    dry_run      count only
    pause        called every so often: it may wait, or raise to break off
    """

    def __init__(
        self,
        store: ObjectStore,
        scratch_dir: Path,
        *,
        everything: bool = False,
        dry_run: bool = False,
        clock: Callable[[], float] = time.time,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.removed = Removed()
        self._store, self._scratch_dir = store, scratch_dir
        self._everything, self._dry_run = everything, dry_run
        self._clock, self._pause = clock, pause
        self._steps = 0
        self._counted: set[str] = set()

    def run(self) -> Removed:
        """Do all of it; return what was removed."""
        self._deleted_jobs()
        self._expired_files()
        self._ended_jobs()
        self._unrecorded_uploads()
        self._idempotency_keys()
        for size in self._store.clean(self._clock() - DAY, self._dry_run):
            self.removed.count("drafts", size)
        return self.removed

    def _deleted_jobs(self) -> None:
        """Finish deletions, and undo what was written since by processes that did not know of them."""
        for tombstone in self._list(deletion.TOMBSTONES):
            record = deletion.begun(self._store, tombstone.key.removeprefix(deletion.TOMBSTONES))
            if record is None:
                continue
            for found in deletion.names(self._store, record):
                self._remove("deleted jobs", found)
            for found in deletion.contents(self._store, record.id):
                self._remove("deleted jobs", found)
            if self._older(tombstone, DAY):
                self._remove("markers", tombstone)

    def _expired_files(self) -> None:
        """Remove files an hour after they expired: a download, or a create that found them, has that long."""
        for marker in self._list("expiring/"):
            tenant, _, name = marker.key.removeprefix("expiring/").partition("/")
            file_id, _, due = name.partition("@")
            if not (ids.is_id(file_id) and due.isdecimal()) or int(due) + HOUR > self._clock():
                continue
            key = record_key(tenant, file_id)
            if (size := self._store.size(key)) is not None:
                self._remove("expired files", Object(key, size))
            self._expired_bytes(file_id)
            self._remove("markers", marker)

    def _expired_bytes(self, file_id: str) -> None:
        name, _, kind = file_id.removeprefix("file-").partition("_")
        if kind in deletion.RESULT_KINDS:
            # Its parts hold the same lines. All results of a job expire at once.
            for place in ("parts/", "out/"):
                for found in self._list(f"{deletion.folder(f'batch_{name}')}{place}"):
                    self._remove("expired results", found)
            return
        key = f"files/{file_id}"
        if (size := self._store.size(key)) is not None and key not in self._still_read:
            self._remove("expired files", Object(key, size))

    def _ended_jobs(self) -> None:
        """Remove what the manifest of a job does not name; those who write late have an hour, and a day."""
        if self._everything:
            for job_id in self._folders():
                self._examine(job_id)
        for marker in self._list("ended/"):
            job_id = marker.key.removeprefix("ended/")
            if not _is_job(job_id):
                continue
            if not self._everything:
                self._examine(job_id)
            if self._older(marker, DAY):
                self._remove("markers", marker)

    def _folders(self) -> Iterator[str]:
        """Yield the ids of all jobs of which anything lies in the store."""
        last = ""
        for found in self._list("jobs/"):
            job_id = found.key.split("/")[1]
            if job_id != last and _is_job(job_id):
                yield job_id
            last = job_id

    def _examine(self, job_id: str) -> None:
        folder = deletion.folder(job_id)
        if self._store.size(f"open/{job_id}") is not None:
            return
        if self._store.size(f"{folder}job.json") is None:
            # Deleted long ago, and written to since by a process that had hung for more than a day.
            if all(self._older(found, DAY) for found in self._list(folder)):
                for found in self._list(folder):
                    self._remove("deleted jobs", found)
            return
        ended = self._find(finalize.manifest_key(job_id))
        manifest = finalize.found(self._store, job_id)
        if ended is None or manifest is None or not self._older(ended, HOUR):
            return
        named = _named(manifest)
        for place, kind in (("plan/", "plans"), ("parts/", "parts"), ("out/", "results")):
            for found in self._list(folder + place):
                if found.key not in named:
                    self._remove(kind, found)

    def _unrecorded_uploads(self) -> None:
        """Remove bytes without a record: uploads that broke off, deleted files that a job was reading."""
        tenants = set()
        with Scratch(self._scratch_dir, _UPLOADS) as scratch:
            for found in self._list("files/"):
                if self._older(found, DAY) and _is_file(_name(found)):
                    scratch.db.execute("INSERT OR IGNORE INTO uploads VALUES (?)", (_name(found),))
            for found in self._list("file-records/"):
                tenants.add(found.key.split("/")[1])
                name = _name(found).removesuffix(".json")
                scratch.db.execute("DELETE FROM uploads WHERE id = ?", (name,))
            left = [name for (name,) in scratch.db.execute("SELECT id FROM uploads")]
        needed = self._inputs_of_open_jobs() if left else set()
        for name in left:
            upload = self._find(f"files/{name}")
            # Looked at anew: a create that is sent again writes its inline input again.
            known = any(self._store.size(record_key(tenant, name)) is not None for tenant in tenants)
            if upload and not known and upload.key not in needed and self._older(upload, DAY):
                self._remove("unrecorded uploads", upload)

    @cached_property
    def _still_read(self) -> set[str]:
        """The inputs of jobs that were open when first asked: a job cannot begin with an expired file."""
        return self._inputs_of_open_jobs()

    def _inputs_of_open_jobs(self) -> set[str]:
        inputs = set()
        for marker in self._list("open/"):
            job_id = marker.key.removeprefix("open/")
            try:
                record = JobRecord.from_json(self._store.get(f"{deletion.folder(job_id)}job.json"))
            except errors.NotFound:
                continue
            inputs.add(record.input_key)
        return inputs

    def _idempotency_keys(self) -> None:
        """Remove the records of keys whose job was never made."""
        for found in self._list("idempotency/"):
            recent = not self._older(found, DAY)
            if recent or (self._older(found, 2 * DAY) and not self._everything):
                continue
            try:
                job_id = orjson.loads(self._store.get(found.key))["job_id"]
            except errors.NotFound:
                continue
            if self._store.size(f"{deletion.folder(job_id)}job.json") is None:
                self._remove("idempotency keys", found)

    def _list(self, prefix: str) -> Iterator[Object]:
        for found in self._store.list(prefix):
            self._step()
            yield found

    def _find(self, key: str) -> Object | None:
        return next((found for found in self._store.list(key) if found.key == key), None)

    def _remove(self, kind: str, found: Object) -> None:
        self._step()
        if self._dry_run:  # what stays is met again
            if found.key in self._counted:
                return
            self._counted.add(found.key)
        else:
            self._store.delete(found.key)
        self.removed.count(kind, found.size)

    def _step(self) -> None:
        self._steps += 1
        if self._steps % _PAUSE_EVERY == 0:
            self._pause()

    def _older(self, found: Object, seconds: float) -> bool:
        name, before = _name(found), self._clock() - seconds
        return found.modified < before and not (ids.is_id(name) and made_at(name) >= before)


def _named(manifest: Manifest) -> set[str]:
    parts = {results.part_key(manifest.job_id, part["name"]) for part in manifest.parts}
    return parts | {file["key"] for file in manifest.files.values()}


def _name(found: Object) -> str:
    return found.key.rpartition("/")[2]


def _is_job(name: str) -> bool:
    return name.startswith("batch_") and ids.is_id(name)


def _is_file(name: str) -> bool:
    return name.startswith("file-") and ids.is_id(name)
