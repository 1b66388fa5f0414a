"""Bring unfinished jobs back into Redis from the store, which has all that counts.

A job is entered anew, its parts are registered so that finished rows do not run again, and it is planned
again: a plan is a function of the input. Recovering twice, or from two places at once, changes nothing.
"""

import logging

from jobs import finalize, ids, results
from jobs.ledger import Finished, Ledger
from jobs.records import JobRecord, PartEntry, ResultRow
from jobs.store import ObjectStore

log = logging.getLogger(__name__)
OPEN = "open/"


def after_restart(ledger: Ledger, store: ObjectStore) -> list[str]:
    """Recover if Redis restarted since the last time: it may have lost all, or its last second."""
    run = ledger.redis_run()
    if ledger.recovered_run() == run:
        return []
    recovered = recover(ledger, store)
    ledger.note_recovered(run)
    return recovered


def recover(ledger: Ledger, store: ObjectStore) -> list[str]:
    """Enter every unfinished job of the store that Redis does not know; return their ids."""
    recovered = []
    for marker in store.list(OPEN):
        job_id = marker.key.removeprefix(OPEN)
        if ledger.job(job_id) is None and _bring_back(job_id, ledger, store):
            recovered.append(job_id)
    if recovered:
        log.warning("jobs recovered from the store", extra={"jobs": len(recovered), "first": recovered[:10]})
    return recovered


def _bring_back(job_id: str, ledger: Ledger, store: ObjectStore) -> bool:
    if store.size(finalize.manifest_key(job_id)) is not None:
        # Its finalizer died between the manifest and the marker: the manifest alone is the end of a job.
        store.delete(OPEN + job_id)
        return False
    record = JobRecord.from_json(store.get(f"jobs/{job_id}/job.json"))
    # Held while parts are registered: a plan that was faster would have finished rows run again, and a
    # deadline or a cancellation would leave them out of the results.
    unit = ledger.recover(record)
    if unit is None:
        return False
    for name in results.list_parts(store, job_id):
        finished = [_finished(job_id, row) for row in results.read_part(store, job_id, PartEntry(name))]
        ledger.complete(None, job_id, name, finished)
        ledger.extend_unit(unit)
    if store.size(f"jobs/{job_id}/cancelled") is not None:
        ledger.cancel(job_id)
    ledger.release_unit(unit)
    return True


def _finished(job_id: str, row: ResultRow) -> Finished:
    # A row that never ran (cancelled, expired) has an error without being a failed one.
    failed = None if row.line["error"] is not None and not row.failed else row.failed
    return Finished(ids.request_id(job_id, row.row), None, row.row, failed, *row.usage)
