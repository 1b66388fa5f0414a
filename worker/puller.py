"""Keep the engine busy: claim groups as it has room, hand finished requests on. One thread's work."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

import redis

from jobs.ledger import Group, Lease, Ledger
from worker import translate
from worker.engine import Completion, Engine
from worker.flusher import Done, Flusher
from worker.held import Held
from worker.watchdog import Watchdog

log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0


class Puller:
    """Drives one engine. Only `cancel` may be called from other threads. `groups` counts what this worker
    claimed, with those before this engine; `given_back` the requests that it released.
    """

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        fingerprint: str,
        held: Held,
        flusher: Flusher,
        worker: str,
        watchdog: Watchdog | None = None,
        on_claimed: Callable[[int, Group], None] = lambda number, group: None,
        groups: int = 0,
    ) -> None:
        self._engine, self._ledger, self._held, self._flusher = engine, ledger, held, flusher
        self._fingerprint, self._worker = fingerprint, worker
        self._on_claimed = on_claimed
        self._watchdog = watchdog or Watchdog(0, lambda _: None)
        self._translator = translate.Translator(engine.tokenizer)
        self._cancelled: deque[str] = deque()
        self._bucket: int | None = None
        self._alone = False
        engine.on_admit = self._admit
        self.groups, self.given_back = groups, 0

    @property
    def busy(self) -> bool:
        return self._engine.has_work

    def cancel(self, leases: Iterable[Lease]) -> None:
        """Drop requests whose lease is lost: they are somebody else's, or nobody's."""
        leases = list(leases)
        self._held.drop(leases)
        self._cancelled.extend(lease.request.id for lease in leases)

    def turn(self, claiming: bool = True) -> bool:
        """Claim what there is room for, run one step, pass on what it finished; False: nothing to do."""
        with self._watchdog.watching(self._engine.progress):
            return self._turn(claiming)

    def _turn(self, claiming: bool) -> bool:
        self._drop_cancelled()
        if claiming:
            try:
                self._claim()
            except redis.RedisError as error:
                # What runs goes on; whatever else is raised here is the engine's, and ends the worker.
                log.warning("not claimed: Redis does not answer", extra={"reason": str(error)})
        # Nothing joins one that runs alone, or a worker that stops: they are not to wait for company.
        self._engine.expects_more = claiming and not self._alone
        if not self._engine.has_work:
            self._alone = False
            self._flusher.hurry()
            return False
        for completion in self._engine.step():
            self._finish(completion)
        return True

    def release_waiting(self) -> None:
        """Give back what has not begun to run."""
        running = self._engine.running
        self._release([lease for lease in self._held.unfinished() if lease.request.id not in running])

    def release_all(self) -> None:
        """Give back what has no result yet."""
        self._release(self._held.unfinished())

    def _claim(self) -> None:
        while not self._alone and (room := self._engine.room()) > 0:
            # A suspect may end this process, and what is finished here but not written would go with it.
            idle = not self._engine.has_work and not len(self._held)
            with self._watchdog.paused():
                group = self._ledger.claim(self._fingerprint, room, self._bucket, idle)
            if group is None:
                return
            self._take(group)

    def _take(self, group: Group) -> None:
        self.groups += 1
        self._bucket, self._alone = group.bucket, group.alone
        self._on_claimed(self.groups, group)
        self._held.add(group.leases)
        self._engine.add([translate.engine_request(lease.request) for lease in group.leases])
        jobs = {lease.request.job_id for lease in group.leases}
        log.info(
            "group claimed",
            extra={
                "group": self.groups,
                "bucket": group.bucket,
                "requests": len(group.leases),
                "jobs": sorted(jobs)[:10],
                "alone": group.alone,
            },
        )

    def _admit(self, ids: list[str]) -> list[str]:
        """Mark requests as running before they run, so that a crash is blamed on them and no others."""
        leases = self._held.get(ids)
        lost = set(ids) - {lease.request.id for lease in leases}
        with self._watchdog.paused():
            lost.update(_until_answered(lambda: self._ledger.start(self._fingerprint, leases)))
        self._held.drop(lease for lease in leases if lease.request.id in lost)
        return list(lost)

    def _finish(self, completion: Completion) -> None:
        for lease in self._held.get([completion.id]):
            if completion.finish_reason == "cancelled":
                continue
            rows = self._translator.rows_of(
                lease.request, completion, self._fingerprint, lease.attempts, self._worker
            )
            self._held.finish(lease)
            self._flusher.put(Done(lease, rows))

    def _drop_cancelled(self) -> None:
        dropped = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        # A request whose lease was lost may have been claimed anew meanwhile; that one stays.
        held = {lease.request.id for lease in self._held.get(dropped)}
        if gone := [id for id in dropped if id not in held]:
            self._engine.cancel(gone)
            log.warning("requests dropped: their leases were lost", extra={"requests": len(gone)})

    def _release(self, leases: list[Lease]) -> None:
        if not leases:
            return
        self._engine.cancel([lease.request.id for lease in leases])
        self._held.drop(leases)
        self._ledger.release(self._fingerprint, leases)
        self.given_back += len(leases)
        log.info("requests released", extra={"requests": len(leases)})


def _until_answered(call: Callable[[], list[str]]) -> list[str]:
    while True:
        try:
            return call()
        except redis.RedisError as error:
            log.warning("admission waits for Redis", extra={"reason": str(error)})
            time.sleep(RETRY_SECONDS)
