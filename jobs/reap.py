"""Reaping, whoever does it: leases that ran out, requests that kill workers, jobs past their time or lost."""

import logging

from jobs import recover, results
from jobs.ledger import Finished, Lease, Ledger
from jobs.metrics import families, shared
from jobs.settings import Settings
from jobs.store import ObjectStore

log = logging.getLogger(__name__)


def reap(settings: Settings, ledger: Ledger, store: ObjectStore) -> list[str]:
    """Do one round; return the ids of the jobs that expired and wait to be finalized.

    The requests that are given up are leased to this caller: if it dies before their lines are written, the
    lease runs out and the next round gives them up again.
    """
    recover.after_restart(ledger, store)
    reaped = ledger.reap(list(settings.fingerprints.values()))
    for fingerprint, count in reaped.expired.items():
        shared.leases_expired.labels(families.model_of(fingerprint)).inc(count)
    if reaped.requeued:
        log.warning("leases expired", extra={"requeued": reaped.requeued})
    for lease in reaped.given_up:
        _give_up(lease, ledger, store)
    expired = ledger.expire_due()
    shared.jobs_expired.inc(len(expired))
    for job_id in expired:
        log.warning("job expired", extra={"job": job_id})
    return expired


def _give_up(lease: Lease, ledger: Ledger, store: ObjectStore) -> None:
    request = lease.request
    part = results.Part(request.job_id)
    message = "The request was given up: it ended the process of the workers that ran it alone."
    part.add(results.given_up(request, "worker_lost", message))
    part.write(store)
    finished = [Finished(request.id, lease.token, row, True) for row in request.rows]
    refused = ledger.complete(lease.fingerprint, request.job_id, part.name, finished)
    shared.requests_finished.labels(request.model, "worker_lost").inc(len(finished) - len(refused))
    extra = {"job": request.job_id, "request": request.id, "custom_id": request.custom_id}
    log.error("request given up", extra=extra)
