"""Tells the ledger that this worker is there, hears whether it is to go, and notices that it is idle."""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jobs.ledger import Ledger
from jobs.ledger_fleet import Present

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """What a worker does at the moment. `uses` grows with all it ever began, so that short work shows too.
    `model` is the fingerprint of the one it serves, or loads; `unavailable` tells why others cannot be.
    """

    state: str
    held: int
    units: int
    uses: int
    capacity: int = 1
    model: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


class Presence:
    """Reports a worker, and calls `retire` once: when it is told to, or was idle for `limit_seconds`.

    Idle is a worker that serves, holds no lease on a request and no unit, and for none of whose models
    (fingerprints) anything is queued, while no job waits to be planned or finalized. What Redis does not tell
    counts as work. None: an idle worker stays.
    """

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        models: Sequence[str],
        look: Callable[[], Seen],
        retire: Callable[[str], None],
        limit_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._look, self._retire = ledger, look, retire
        self._limit, self._clock = limit_seconds, clock
        first = next(iter(models), None)
        several = tuple(models) if len(models) > 1 else ()
        self._models = models
        self._present = Present(name, socket.gethostname(), os.getpid(), first, "loading", models=several)
        self._since = clock()
        self._uses = 0

    def report(self) -> None:
        """Say what the worker does."""
        seen = self._look()
        idle = self._clock() - self._since
        present = replace(
            self._present,
            state=seen.state,
            held=seen.held,
            units=seen.units,
            capacity=seen.capacity,
            model=seen.model or self._present.model,
            idle_seconds=round(idle, 3),
            unavailable=dict(seen.unavailable),
        )
        if self._ledger.fleet.report(present) and seen.state in ("loading", "serving"):
            self._retire("told to")

    def watch(self) -> None:
        """Note whether the worker is idle; retire it when that has lasted long enough."""
        seen = self._look()
        used = seen.state != "serving" or seen.held or seen.units or seen.uses != self._uses
        self._uses = seen.uses
        if used:
            self._since = self._clock()
        elif self._limit is not None and self._clock() - self._since >= self._limit:
            if self._queued():
                self._since = self._clock()
            else:
                self._retire(f"idle for {self._limit:g} s")

    def leave(self) -> None:
        """Say that the worker ends."""
        self._ledger.fleet.leave(self._present.name)

    def _queued(self) -> bool:
        """Whether something may be about to come: jobs of other models that are fed do not keep it."""
        if self._ledger.fleet.begun_and_ended():
            return True
        if not self._models:
            return False
        loads, _ = self._ledger.fleet.load(self._models)
        return any(load.queued for load in loads.values())
