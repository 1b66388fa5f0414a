"""The deletion of an ended job: everything the store has of it, but not its input file.

A tombstone, `deleted/<job>` with the job's record less its metadata, is written first and stays for a day:
with it the sweep finishes what broke off, and removes what a process that hung for hours still writes.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from jobs import errors, ids
from jobs.files import record_key
from jobs.records import JobRecord
from jobs.store import Object, ObjectStore

TOMBSTONES = "deleted/"
RESULT_KINDS = ("output", "errors", "metrics", "summary")
_DELETERS = 16


def begin(store: ObjectStore, record: JobRecord) -> None:
    """Write the tombstone: from here on the job will be gone, whatever happens."""
    store.put(TOMBSTONES + record.id, replace(record, metadata=None).to_json())


def begun(store: ObjectStore, job_id: str) -> JobRecord | None:
    """Return the record of a job whose deletion has begun, None for any other."""
    try:
        return JobRecord.from_json(store.get(TOMBSTONES + job_id))
    except errors.NotFound:
        return None


def purge(store: ObjectStore, record: JobRecord) -> int:
    """Remove all that is left of a job; return how many objects that were."""
    removed = 0
    for found in names(store, record):
        store.delete(found.key)
        removed += 1
    with ThreadPoolExecutor(_DELETERS) as pool:
        keys = (found.key for found in contents(store, record.id))
        return removed + sum(1 for _ in pool.map(store.delete, keys))


def names(store: ObjectStore, record: JobRecord) -> Iterator[Object]:
    """Yield what makes the job and its files known, in the order to delete it.

    The Idempotency-Key comes before the job's record: a create that repeats it must not find half a job.
    """
    keys = [f"job-index/{record.tenant}/{record.id}", f"open/{record.id}", f"ended/{record.id}"]
    if record.idempotency and _names_job(store, record.idempotency, record.id):
        keys.insert(0, record.idempotency)
    files = [ids.result_file_id(record.id, kind) for kind in RESULT_KINDS]
    keys += [f"{folder(record.id)}job.json", *(record_key(record.tenant, file) for file in files)]
    for key in keys:
        if (size := store.size(key)) is not None:
            yield Object(key, size)
    if record.output_expires_seconds:
        for file in files:
            yield from store.list(f"expiring/{record.tenant}/{file}@")


def contents(store: ObjectStore, job_id: str) -> Iterator[Object]:
    """Yield what else lies in a job's folder; its record is among the names, which go first."""
    return (found for found in store.list(folder(job_id)) if not found.key.endswith("/job.json"))


def folder(job_id: str) -> str:
    """Return the beginning of the keys of what a job consists of."""
    return f"jobs/{job_id}/"


def _names_job(store: ObjectStore, key: str, job_id: str) -> bool:
    """Tell whether the record of an Idempotency-Key is of this job: the key may be in use anew."""
    try:
        return f'"{job_id}"'.encode() in store.get(key)
    except errors.NotFound:
        return False
