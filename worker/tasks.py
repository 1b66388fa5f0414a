"""The tasks: each says 'look at this now' to the service, and is not missed if it is lost."""

import logging
from typing import Any

from jobs import errors, ids, queue
from worker.celery import app

log = logging.getLogger(__name__)


def _run_unit(service: Any, kind: str, job_id: str) -> None:
    if not ids.is_id(job_id):
        log.error("task dropped: not a job id", extra={"task": kind, "job": str(job_id)[:100]})
        return
    try:
        service.run_unit(kind, job_id)
    except errors.LeaseLost as error:
        log.info("unit went to another worker", extra={"unit": kind, "job": job_id, "reason": str(error)})


@app.task(name=queue.PLAN)
def plan(job_id: str) -> None:
    """Validate, tokenize and shard a job."""
    _run_unit(app.service, "plan", job_id)


@app.task(name=queue.FEED)
def feed(job_id: str) -> None:
    """Move requests of a job from its shards into Redis."""
    _run_unit(app.service, "feed", job_id)


@app.task(name=queue.FINALIZE)
def finalize(job_id: str) -> None:
    """Merge a job's parts into its files."""
    _run_unit(app.service, "finalize", job_id)


@app.task(name=queue.WAKE)
def wake(fingerprint: str) -> None:
    """Let the pull service look for work now instead of at its next poll."""
    app.service.wake()
