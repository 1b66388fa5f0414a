"""The API's share of reaping: with no worker running, expired leases and jobs still come back."""

import logging
import threading
from collections.abc import Callable

import redis

from api.context import Context
from jobs import errors, queue, reap, recover

log = logging.getLogger(__name__)


class Reaper:
    """A daemon thread that reaps every `reap_seconds`, and wakes workers for the jobs that end by it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reaper", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop it and wait for it."""
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        recovered = False
        while not self._stop.wait(self._context.settings.reap_seconds):
            recovered = recovered or self._guarded(recover_stored)
            self._guarded(tick)

    def _guarded(self, step: Callable[[Context], None]) -> bool:
        try:
            step(self._context)
        except (redis.RedisError, errors.LonghaulError) as error:
            # It comes back by itself; a request that needs it meanwhile answers 503.
            log.warning("not reaped", extra={"reason": str(error) or type(error).__name__})
        except Exception:
            log.exception("not reaped")
        else:
            return True
        return False


def recover_stored(context: Context) -> None:
    """Enter the jobs that only the store knows, because an API ended between writing there and in Redis."""
    for job_id in recover.recover(context.ledger, context.store):
        context.queue.send(queue.PLAN, job_id)


def tick(context: Context) -> None:
    """Do one round of reaping. Nothing hangs on the wakes: a worker that polls finds the same units."""
    context.acceptor.enter_waiting()
    for job_id in reap.reap(context.settings, context.ledger, context.store):
        context.queue.send(queue.FINALIZE, job_id)
