"""The wire form of what the store and the ledger know: pure functions from records to schema objects."""

from jobs import ledger_answers, schema
from jobs.ledger import Job
from jobs.records import FileRecord, JobRecord, Manifest

TERMINAL = frozenset({"completed", "failed", "cancelled", "expired"})


def file(record: FileRecord) -> schema.File:
    """Return the File of a record."""
    return schema.File(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )


def batch(record: JobRecord, job: Job | None, manifest: Manifest | None, cancelled: bool) -> schema.Batch:
    """Return the Batch of a job: by its manifest when it has ended, else by the ledger, else by its record.

    A job that neither knows is one that Redis has lost: it shows as `validating` (or `cancelling`, when that
    was accepted) until recovery brings it back.
    """
    if manifest is not None:
        return _ended(record, manifest)
    if job is not None:
        return _running(record, job)
    return _batch(record, "cancelling" if cancelled else "validating", None, {})


def _running(record: JobRecord, job: Job) -> schema.Batch:
    return _batch(
        record,
        str(job.state.value),
        job.model,
        job.times,
        request_counts=schema.RequestCounts(total=job.total, completed=job.completed, failed=job.failed),
        usage=usage(*job.usage),
    )


def ending(record: JobRecord, manifest: Manifest) -> schema.Batch:
    """Return the Batch of a job whose manifest lies in the store, but of whose files that is not known."""
    status = "cancelling" if manifest.state == "cancelled" else "finalizing"
    times = {name: at for name, at in manifest.times.items() if name != f"{manifest.state}_at"}
    return _batch(record, status, manifest.model, times, **_counted(manifest))


def _ended(record: JobRecord, manifest: Manifest) -> schema.Batch:
    files = {kind: facts["id"] for kind, facts in manifest.files.items()}
    lines = [schema.LineError(**error) for error in manifest.errors]
    return _batch(
        record,
        manifest.state,
        manifest.model,
        manifest.times,
        errors=schema.LineErrors(data=lines) if lines else None,
        output_file_id=files.get("output"),
        error_file_id=files.get("errors"),
        running_seconds=manifest.running_seconds,
        tokens_per_second=manifest.tokens_per_second,
        **_counted(manifest),
    )


def _counted(manifest: Manifest) -> dict[str, object]:
    counts = schema.RequestCounts(total=manifest.total, completed=manifest.completed, failed=manifest.failed)
    return {"request_counts": counts, "usage": usage(*manifest.usage)}


def _batch(
    record: JobRecord, status: str, model: str | None, times: dict[str, float], **fields: object
) -> schema.Batch:
    stamps = {name: int(times[name]) for name in ledger_answers.TIMES if times.get(name)}
    return schema.Batch.model_validate(
        {
            "id": record.id,
            "endpoint": record.endpoint,
            "model": model,
            "input_file_id": record.input_file_id,
            "completion_window": record.completion_window,
            "status": status,
            "created_at": int(record.created_at),
            "expires_at": int(record.expires_at),
            "metadata": record.metadata,
            **stamps,
            **fields,
        }
    )


def usage(prompt: int, cached: int, completion: int, reasoning: int) -> schema.Usage:
    return schema.Usage(
        input_tokens=prompt,
        input_tokens_details=schema.InputDetails(cached_tokens=cached),
        output_tokens=completion,
        output_tokens_details=schema.OutputDetails(reasoning_tokens=reasoning),
        total_tokens=prompt + completion,
    )
