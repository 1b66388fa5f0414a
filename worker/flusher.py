"""Write finished requests to parts, and only then mark them complete."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread

import redis

from jobs import log as log_lines
from jobs import results
from jobs.ledger import Finished, Lease, Ledger
from jobs.records import ResultRow
from jobs.settings import Settings
from jobs.store import ObjectStore
from worker.held import Held

log = logging.getLogger(__name__)
WRITERS = 4
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Done:
    """A request that is finished, with the rows it leaves (its followers' too)."""

    lease: Lease
    rows: list[ResultRow]


class Flusher:
    """One thread gathers rows into a part per job, a few write them; leases are held until rows count.

    `on_written` is called, from any thread, when some do, and `on_counted` with these rows, the leases they
    had, and how many rows were refused.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        store: ObjectStore,
        held: Held,
        fingerprint: str,
        on_written: Callable[[], None] = lambda: None,
        on_counted: Callable[[list[ResultRow], list[Lease], int], None] = lambda *_: None,
    ) -> None:
        self._settings, self._ledger, self._store, self._held = settings, ledger, store, held
        self._fingerprint, self._on_written, self._on_counted = fingerprint, on_written, on_counted
        self._queue: SimpleQueue[Done | None] = SimpleQueue()
        self._hurry, self._abandon = Event(), Event()
        self._open: dict[str, tuple[results.Part, list[Lease]]] = {}
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="part-writer")
        self._thread = Thread(target=self._gather, name="flusher", daemon=True)
        self.completed = self.refused = 0

    def start(self) -> None:
        self._thread.start()

    def put(self, done: Done) -> None:
        self._queue.put(done)

    def hurry(self) -> None:
        """Write what is there without waiting for more: the engine has nothing to do."""
        self._hurry.set()

    def close(self, seconds: float) -> None:
        """Write everything; what cannot be written in time is left to the leases' expiry."""
        deadline = time.monotonic() + seconds
        self._queue.put(None)
        self._thread.join(seconds)
        while self._held.unwritten and time.monotonic() < deadline:
            time.sleep(0.05)
        self._abandon.set()
        self._writers.shutdown(wait=False, cancel_futures=True)

    def _gather(self) -> None:
        while True:
            try:
                done = self._queue.get(timeout=min(self._settings.flush_seconds, 0.1))
            except Empty:
                if self._hurry.is_set():
                    self._hurry.clear()
                    self._flush(list(self._open))
            else:
                if done is None:
                    self._flush(list(self._open))
                    return
                self._add(done)
            oldest = time.monotonic() - self._settings.flush_seconds
            self._flush([job_id for job_id, (part, _) in self._open.items() if part.opened < oldest])

    def _add(self, done: Done) -> None:
        job_id = done.lease.request.job_id
        part, leases = self._open.setdefault(job_id, (results.Part(job_id), []))
        part.add(done.rows)
        leases.append(done.lease)
        if part.bytes >= self._settings.flush_bytes:
            self._flush([job_id])

    def _flush(self, job_ids: list[str]) -> None:
        for job_id in job_ids:
            self._writers.submit(self._write, *self._open.pop(job_id))

    def _write(self, part: results.Part, leases: list[Lease]) -> None:
        tokens = {row: lease.token for lease in leases for row in lease.request.rows}
        ids = {row: lease.request.id for lease in leases for row in lease.request.rows}
        rows = [Finished(ids[r.row], tokens[r.row], r.row, r.failed, *r.usage) for r in part.rows]
        while not self._abandon.is_set():
            try:
                with log_lines.about(job=part.job_id, part=part.name):
                    part.write(self._store)
                refused = self._ledger.complete(self._fingerprint, part.job_id, part.name, rows)
                break
            except redis.RedisError as error:
                # Redis may be away for long; the rows are in the store, and count when it answers or refuses.
                log.warning("completion waits for Redis", extra={"job": part.job_id, "reason": str(error)})
            except Exception:
                log.exception("part not written", extra={"job": part.job_id, "part": part.name})
            self._abandon.wait(RETRY_SECONDS)
        else:
            return
        lost = set(refused)
        self._on_counted([row for row in part.rows if row.row not in lost], leases, len(lost))
        self._held.drop(leases)
        self._on_written()
        self.completed += len(rows) - len(refused)
        self.refused += len(refused)
        if refused:
            log.warning(
                "rows refused: their leases were lost", extra={"job": part.job_id, "rows": refused[:20]}
            )
