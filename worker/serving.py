"""One model while it is loaded: its engine, what claims for it and what writes its results."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from worker import engine
from worker.flusher import Flusher
from worker.held import Held
from worker.puller import Puller

FLUSH_SHARE = 0.3
"""The share of drain_seconds kept for writing what is finished."""
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class Serving:
    """A model that is loaded. One thread calls all of it but `save`."""

    name: str
    fingerprint: str
    engine: engine.Engine
    flusher: Flusher
    puller: Puller
    held: Held

    def finish(self, wait: Callable[[], None], going_on: Callable[[], bool]) -> bool:
        """Run what is here to its end and have it written, claiming nothing; False: told to stop before."""
        while going_on():
            if self.puller.turn(claiming=False):
                continue
            if not len(self.held):
                self.flusher.close(_CLOSE_SECONDS)  # rows whose leases were lost may be there still
                return True
            wait()
        return False

    def drain(self, guarded: Callable[[Callable[[], None]], object], stop_at: float, keep: float) -> None:
        """Finish what can be until `stop_at` (monotonic), `keep` seconds of which are for writing it."""
        guarded(self.puller.release_waiting)
        while self.puller.busy and time.monotonic() < stop_at - keep:
            self.puller.turn(claiming=False)
        self.flusher.hurry()
        if self.puller.busy:
            guarded(self.puller.release_all)
        self.flusher.close(max(0.5, stop_at - time.monotonic()))

    def save(self, seconds: float) -> None:
        """Write what is finished and give back what only waited; of what runs, the leases will tell."""
        self.flusher.close(seconds)
        self.puller.release_waiting()
