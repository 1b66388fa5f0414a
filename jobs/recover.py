"""Bring unfinished jobs back into Redis from the store, which has all that counts.

A job that Redis lost is entered anew, its parts are registered so that finished rows do not run again, and
it is planned again: a plan is a function of the input. Of a job that it still has, Redis may have lost the
last second: what the store knows better is told again. Recovering twice, or from two places at once, changes
nothing.
"""

import logging

import redis

from jobs import errors, finalize, ids, results
from jobs.files import record_key
from jobs.ledger import Finished, Job, Ledger
from jobs.quotas import BYTES_PER_TOKEN
from jobs.records import FileRecord, JobRecord, Manifest, PartEntry, ResultRow
from jobs.store import ObjectStore

log = logging.getLogger(__name__)
OPEN = "open/"


def after_restart(ledger: Ledger, store: ObjectStore) -> list[str]:
    """Recover if Redis restarted since the last time: it may have lost all, or its last second."""
    run = ledger.redis_run()
    if ledger.recovered_run() == run:
        return []
    recovered = recover(ledger, store)
    try:
        ledger.note_recovered(run)
    except redis.OutOfMemoryError:
        log.warning("Redis is full: recovery cannot be noted, and will be done again")
    return recovered


def recover(ledger: Ledger, store: ObjectStore) -> list[str]:
    """Tell Redis of every unfinished job what only the store knows; return the ids of those it had lost."""
    recovered = []
    marked = [marker.key.removeprefix(OPEN) for marker in store.list(OPEN)]
    for job_id in sorted({*marked, *ledger.unfinished()}):
        try:
            if _recover(job_id, ledger, store):
                recovered.append(job_id)
        except errors.NotFound:
            if store.size(f"jobs/{job_id}/job.json") is not None:
                raise
            log.warning("job was deleted", extra={"job": job_id})
    if recovered:
        log.warning("jobs recovered from the store", extra={"jobs": len(recovered), "first": recovered[:10]})
    return recovered


def _recover(job_id: str, ledger: Ledger, store: ObjectStore) -> bool:
    """Tell Redis what only the store knows of one job; tell whether Redis had lost it."""
    job = ledger.job(job_id)
    if (manifest := finalize.found(store, job_id)) is not None:
        _end(manifest, ledger, store)
        return False
    if job is None:
        return _bring_back(job_id, ledger, store)
    _catch_up(job, ledger, store)
    return False


def _end(manifest: Manifest, ledger: Ledger, store: ObjectStore) -> None:
    """Do what the finalizer of a job still had to do when it died, or what Redis forgot that it did."""
    finalize.publish(store, _record(manifest.job_id, store), manifest)
    finalize.close(store, manifest.job_id)
    ledger.end(manifest)


def _bring_back(job_id: str, ledger: Ledger, store: ObjectStore) -> bool:
    # Held while parts are registered: a plan that was faster would have finished rows run again, and a
    # deadline or a cancellation would leave them out of the results.
    record = _record(job_id, store)
    _count(record, ledger, store)
    unit = ledger.recover(record)
    if unit is None:
        return False
    for name in results.list_parts(store, job_id):
        _register(job_id, name, ledger, store)
        ledger.extend_unit(unit)
    if _is_cancelled(job_id, store):
        ledger.cancel(job_id)
    ledger.release_unit(unit)
    return True


def _count(record: JobRecord, ledger: Ledger, store: ObjectStore) -> None:
    """Count a job in its tenant's quotas as a create does; its parts then take off what has finished."""
    try:
        file = FileRecord.from_json(store.get(record_key(record.tenant, record.input_file_id)))
        requests = file.lines or 1
    except errors.NotFound:  # deleted while the job runs: the plan will tell
        requests = 1
    tokens = (store.size(record.input_key) or 0) // BYTES_PER_TOKEN
    ledger.tenants.reserve(record.tenant, record.id, requests, tokens, None, None)


def _catch_up(job: Job, ledger: Ledger, store: ObjectStore) -> None:
    known = {entry.name for entry in ledger.parts(job.id)}
    for name in results.list_parts(store, job.id):
        if name not in known:
            _register(job.id, name, ledger, store)
    if _is_cancelled(job.id, store):
        ledger.cancel(job.id)


def _register(job_id: str, name: str, ledger: Ledger, store: ObjectStore) -> None:
    rows = list(results.read_part(store, job_id, PartEntry(name)))
    # Lines of a cancellation or an expiry are no results: the next finalizer writes them again.
    if any(_ran(row) for row in rows):
        finished = [
            Finished(ids.request_id(job_id, row.row), None, row.row, row.failed, *row.usage) for row in rows
        ]
        ledger.complete(None, job_id, name, finished)


def _ran(row: ResultRow) -> bool:
    return row.line["error"] is None or row.failed


def _record(job_id: str, store: ObjectStore) -> JobRecord:
    return JobRecord.from_json(store.get(f"jobs/{job_id}/job.json"))


def _is_cancelled(job_id: str, store: ObjectStore) -> bool:
    return store.size(f"jobs/{job_id}/cancelled") is not None
