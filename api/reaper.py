"""The API's share of reaping and sweeping, so that neither waits for a worker to run."""

import logging
import threading
from collections.abc import Callable

import redis

from api.context import Context
from jobs import errors, queue, reap, recover, sweeper

log = logging.getLogger(__name__)


class Reaper:
    """A daemon thread that reaps every `reap_seconds`, and wakes workers for the jobs that end by it.

    Another one sweeps, so that a long sweep does not hold up the jobs.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sweeper = sweeper.Sweeper(context.settings, context.ledger.redis, context.store)
        self._stop = self._sweeper.stopping
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("reaper", self._reap), ("sweeper", self._sweep))
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop them and wait for them."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5)

    def _reap(self) -> None:
        recovered = False
        while not self._stop.wait(self._context.settings.reap_seconds):
            recovered = recovered or self._guarded(lambda: recover_stored(self._context), "not reaped")
            self._guarded(lambda: tick(self._context), "not reaped")
            # Not before: a full Redis refuses them until the reaping of other jobs has made room.
            self._guarded(self._context.acceptor.enter_waiting, "accepted jobs not entered")

    def _sweep(self) -> None:
        while not self._stop.wait(self._sweeper.check_seconds):
            self._guarded(self._sweeper.turn, "not swept")

    def _guarded(self, step: Callable[[], None], failure: str) -> bool:
        try:
            step()
        except (redis.RedisError, errors.LonghaulError) as error:
            # It comes back by itself; a request that needs it meanwhile answers 503.
            log.warning(failure, extra={"reason": str(error) or type(error).__name__})
        except Exception:
            log.exception(failure)
        else:
            return True
        return False


def recover_stored(context: Context) -> None:
    """Enter the jobs that only the store knows, because an API ended between writing there and in Redis."""
    for job_id in recover.recover(context.ledger, context.store):
        context.queue.send(queue.PLAN, job_id)


def tick(context: Context) -> None:
    """Do one round of reaping. Nothing hangs on the wakes: a worker that polls finds the same units."""
    for job_id in reap.reap(context.settings, context.ledger, context.store):
        context.queue.send(queue.FINALIZE, job_id)
