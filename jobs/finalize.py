"""The end of a job: merge its parts into files in input order, then write the manifest that names them."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import orjson

from jobs import checks, errors, ids, lines, prefixes, results
from jobs.files import write_record
from jobs.records import FileRecord, JobRecord, Manifest, PartEntry, ResultRow, usage_of
from jobs.scratch import Scratch
from jobs.settings import Settings
from jobs.store import ObjectStore, Writer
from jobs.summary import Summary

log = logging.getLogger(__name__)
_SCHEMA = """
CREATE TABLE rows
    (row INTEGER PRIMARY KEY, answered INTEGER, failed INTEGER, line BLOB, metrics BLOB, usage BLOB)
"""


class RowsMissing(Exception):
    """A job that counts as complete has rows without a result: its parts are not what the ledger says."""


class Merge:
    """Merges the parts of one job. `state` is its terminal state, `directory` where its files go."""

    def __init__(
        self, record: JobRecord, state: str, store: ObjectStore, settings: Settings, directory: str
    ) -> None:
        self.record, self.state, self.store, self.settings = record, state, store, settings
        self.directory = directory
        self.counts = {"total": 0, "completed": 0, "failed": 0}
        self.summary = Summary()

    def run(
        self, parts: Iterable[PartEntry], total: int | None, model: str | None, times: dict[str, float]
    ) -> Manifest:
        """Write the files; return the manifest that names them. `total` None: not counted yet."""
        kept = list(parts)
        with Scratch(self.settings.scratch_dir, _SCHEMA) as scratch:
            for entry in kept:
                _load(scratch, results.read_part(self.store, self.record.id, entry))
            (found,) = scratch.db.execute("SELECT count(*) FROM rows").fetchone()
            self.counts["total"] = found if total is None else total
            if self.state in results.NEVER_RAN:
                kept += self._never_ran(scratch)
            elif found != total:
                raise RowsMissing(f"{self.record.id}: {found} of {total} rows have a result")
            files, summary = self._write(scratch)
        return Manifest(
            job_id=self.record.id,
            state=self.state,
            model=model,
            times=times,
            total=self.counts["total"],
            completed=self.counts["completed"],
            failed=self.counts["failed"],
            usage=self.summary.usage,
            files=files,
            parts=[asdict(entry) for entry in kept],
            running_seconds=summary["running_seconds"],
            tokens_per_second=summary["tokens_per_second"],
        )

    def _never_ran(self, scratch: Scratch) -> list[PartEntry]:
        """Give each request without a result its line, in parts of their own, for readers of /results."""
        code, message = results.NEVER_RAN[self.state]
        written: list[PartEntry] = []
        if self.store.size(self.record.input_key) is None:
            # The job must end all the same; only the input knew the names of what never ran.
            log.error("input file gone: no lines for what never ran", extra={"job": self.record.id})
            return written
        part = results.Part(self.record.id)
        for row, custom_id in enumerate(self._custom_ids()):
            self.counts["total"] = max(self.counts["total"], row + 1)
            if custom_id and not scratch.db.execute("SELECT 1 FROM rows WHERE row = ?", (row,)).fetchone():
                line = results.never(self.record.id, row, custom_id, code, message)
                part.add([ResultRow(row, False, line, None)])
            if part.bytes >= self.settings.flush_bytes:
                written.append(self._keep(part, scratch))
                part = results.Part(self.record.id)
        if part.rows:
            written.append(self._keep(part, scratch))
        return written

    def _keep(self, part: results.Part, scratch: Scratch) -> PartEntry:
        part.write(self.store)
        _load(scratch, part.rows)
        return PartEntry(part.name)

    def _custom_ids(self) -> Iterator[str | None]:
        """Yield the custom_id of each row; None where the line (never validated) has none, or repeats one."""
        with (
            self.store.open(self.record.input_key) as stream,
            Scratch(
                self.settings.scratch_dir, "CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID"
            ) as seen,
        ):
            for line in lines.read(stream, self.settings.max_line_bytes):
                try:
                    custom_id = checks.check(line, self.record, self.settings.max_line_bytes).custom_id
                except checks.LineRefused:
                    yield None
                    continue
                fresh = seen.db.execute(
                    "INSERT OR IGNORE INTO ids VALUES (?)", (custom_id.encode(),)
                ).rowcount
                yield custom_id if fresh else None

    def _write(self, scratch: Scratch) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Write the files; return them by kind, and the summary."""
        rows = scratch.db.execute("SELECT answered, failed, line, metrics, usage FROM rows ORDER BY row")
        with ExitStack() as stack:
            files = _Files(self.store, self.directory, stack)
            for answered, failed, line, metrics, usage in rows:
                files.write("output" if answered else "errors", line)
                self.counts["completed"] += answered
                self.counts["failed"] += failed
                if metrics is not None:
                    files.write("metrics", metrics)
                    self.summary.add(orjson.loads(metrics), usage_of(orjson.loads(usage)))
            summary = self.summary.build(self.counts, self.record.created_at, self.settings.cost_per_hour)
            shared = prefixes.load(self.store, self.record.id)
            summary["prefixes"] = None if shared is None else orjson.loads(shared)
            files.write("summary", orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        made = {
            kind: {"id": ids.result_file_id(self.record.id, kind), "key": files.key(kind), "bytes": size}
            for kind, size in files.sizes.items()
        }
        return made, summary


class _Files:
    """The files of a job, each opened when its first line comes."""

    def __init__(self, store: ObjectStore, directory: str, stack: ExitStack) -> None:
        self._store, self._directory, self._stack = store, directory, stack
        self._open: dict[str, Writer] = {}
        self.sizes: dict[str, int] = {}

    def key(self, kind: str) -> str:
        return f"{self._directory}{kind}.{'json' if kind == 'summary' else 'jsonl'}"

    def write(self, kind: str, line: bytes) -> None:
        if kind not in self._open:
            self._open[kind] = self._stack.enter_context(self._store.writer(self.key(kind)))
        self._open[kind].write(line + b"\n")
        self.sizes[kind] = self.sizes.get(kind, 0) + len(line) + 1


def manifest_key(job_id: str) -> str:
    """Return where the manifest of a job lies."""
    return f"jobs/{job_id}/manifest.json"


def found(store: ObjectStore, job_id: str) -> Manifest | None:
    """Return the manifest of a job that was finalized already, None while it was not."""
    try:
        return Manifest.from_json(store.get(manifest_key(job_id)))
    except errors.NotFound:
        return None


def publish(store: ObjectStore, record: JobRecord, manifest: Manifest) -> Manifest:
    """Write the manifest unless another finalizer was first, then the file records of the one that counts."""
    if not store.put_new(manifest_key(record.id), manifest.to_json()):
        manifest = Manifest.from_json(store.get(manifest_key(record.id)))
    created, expires = _made_at(record, manifest), expires_at(record, manifest)
    for made in manifest.files.values():
        name = made["key"].rsplit("/", 1)[-1]
        file = FileRecord(
            id=made["id"],
            tenant=record.tenant,
            filename=f"{record.id}_{name}",
            purpose="batch_output",
            bytes=made["bytes"],
            created_at=created,
            key=made["key"],
            expires_at=expires,
        )
        write_record(store, file)
    return manifest


def close(store: ObjectStore, job_id: str) -> None:
    """Mark a job whose manifest is published as ended: for the sweep, and not open any more."""
    store.put(f"ended/{job_id}", b"")
    store.delete(f"open/{job_id}")


def expires_at(record: JobRecord, manifest: Manifest) -> int | None:
    """Return when a job's results expire (unix seconds), or None."""
    seconds = record.output_expires_seconds
    return _made_at(record, manifest) + seconds if seconds else None


def _made_at(record: JobRecord, manifest: Manifest) -> int:
    return int(max(manifest.times.values(), default=record.created_at))


def _load(scratch: Scratch, rows: Iterable[ResultRow]) -> None:
    scratch.db.executemany(
        "INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?, ?)",
        (
            (
                row.row,
                row.line["error"] is None and not row.failed,
                row.failed,
                orjson.dumps(row.line),
                None if row.metrics is None else orjson.dumps(row.metrics),
                orjson.dumps(row.usage),
            )
            for row in rows
        ),
    )
