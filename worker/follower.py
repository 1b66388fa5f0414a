"""The life of a rank that follows: it ends when rank 0 does, and not by a signal on which that drains."""

import logging
import os
import signal
import sys
import time
from threading import Thread
from typing import TYPE_CHECKING, NoReturn

from jobs import log
from jobs.settings import Settings
from worker import engine, supervisor

if TYPE_CHECKING:
    from worker.engine import parallel

_events = logging.getLogger(__name__)
STOPPING = (signal.SIGTERM, signal.SIGINT)
_TICK_SECONDS = 0.5
GRACE_SECONDS = 10
"""How long rank 0 may take to say that it ends, after what made both end."""


class Follower:
    """Joins the team, follows, and ends the process.

    torchrun sends its signals to all ranks. One that follows does not end by them: rank 0 drains, with its
    help, and then stops it. That has the time of a drain and no more.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._team: parallel.Team | None = None
        drain = settings.drain_seconds + supervisor.RELEASE_SECONDS + supervisor.CLOSE_SECONDS
        self._limit = drain + GRACE_SECONDS

    def run(self) -> NoReturn:
        """Follow until rank 0 ends. The signals of STOPPING are blocked in all threads."""
        log.setup(format=self._settings.log_format)
        Thread(target=self._watch, name="watch", daemon=True).start()
        try:
            self._follow()
        except Exception as error:
            if not self._leader_ends():
                self._fail(error)
        _end(0)

    def _follow(self) -> None:
        from worker.engine import parallel

        settings = self._settings
        (name,) = settings.served
        self._team = parallel.join(settings.device, settings.collective_timeout_seconds)
        _events.info("following", extra={"rank": self._team.rank, "pid": os.getpid(), "model": name})
        engine.follow_engine(name, settings.models[name], settings)
        _events.info("followed", extra={"rank": self._team.rank})

    def _fail(self, error: Exception) -> NoReturn:
        rank = os.environ["RANK"]
        _events.error("a rank that follows failed", extra={"rank": rank}, exc_info=error)
        reason = str(error).split("\n")[0]
        print(f"longhaul: rank {rank}: {type(error).__name__}: {reason}", file=sys.stderr)
        _end(1)

    def _leader_ends(self) -> bool:
        """Tell whether rank 0 ends for a reason of its own, which it tells itself."""
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until:
            if self._ended():
                return True
            time.sleep(_TICK_SECONDS / 5)
        return False

    def _ended(self) -> bool:
        try:
            return self._team is not None and self._team.ended
        except RuntimeError:  # torchrun, which keeps the store, has ended
            return False

    def _watch(self) -> None:
        """Hear signals while the main thread waits for others, or for a device that hangs."""
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            heard = signal.sigtimedwait(STOPPING, _TICK_SECONDS)
            if heard is not None and self._team is None:
                _end(128 + heard.si_signo)
            if self._ended():
                deadline = min(deadline or float("inf"), time.monotonic() + _TICK_SECONDS)
            elif heard is not None:
                deadline = deadline or time.monotonic() + self._limit
        if not self._ended():
            _events.error("rank 0 has not stopped", extra={"seconds": self._limit})
            _end(1)
        _end(0)


def _end(code: int) -> NoReturn:
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
