"""Shows a run in this process as `longhaul watch` shows a job."""

import time

from jobs import progress, records, schema, views
from jobs.client import Batch
from jobs.records import JobRecord


class Shown:
    """Counts what is finished and tells a view of it."""

    def __init__(self, record: JobRecord, model: str, view: progress.View, total: int) -> None:
        self._record, self._model, self._view = record, model, view
        self._counts = schema.RequestCounts(total=total)
        self._usage = records.NO_USAGE
        self._pace = progress.Pace()

    def add(self, completed: int, failed: int, *usages: records.Usage) -> None:
        """Count requests that have ended since the last call, with their tokens, and show the sum."""
        counts = self._counts
        self._counts = schema.RequestCounts(
            total=counts.total, completed=counts.completed + completed, failed=counts.failed + failed
        )
        for usage in usages:
            self._usage = records.added(self._usage, usage)
        now, counts = time.monotonic(), self._counts
        self._pace.add(now, counts.completed + counts.failed, self._usage[2], counts.failed)
        self._view.show(self._batch(), self._pace, now)

    def note(self, text: str) -> None:
        """Say something once."""
        self._view.note(text)

    def _batch(self) -> Batch:
        return Batch(
            id=self._record.id,
            endpoint=self._record.endpoint,
            model=self._model,
            input_file_id=self._record.input_file_id,
            completion_window=self._record.completion_window,
            status="in_progress",
            created_at=int(self._record.created_at),
            request_counts=self._counts,
            usage=views.usage(*self._usage),
        )
