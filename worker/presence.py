"""Tells the ledger that this worker is there, hears whether it is to go, and notices that it is idle."""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from jobs.ledger import Ledger
from jobs.ledger_fleet import Present

log = logging.getLogger(__name__)
_PROMPT = ("prefill_tokens_computed", "prefix_tokens_reused")


@dataclass(frozen=True)
class Seen:
    """What a worker does at the moment. `uses` grows with all it ever began, so that short work shows too.
    `model` is the fingerprint of the one it serves, or loads; `unavailable` tells why others cannot be;
    `engine` is what its engine has counted.
    """

    state: str
    held: int
    units: int
    uses: int
    capacity: int = 1
    model: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    running: int = 0
    engine: Mapping[str, float] = field(default_factory=dict)


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
        self._present = Present(
            name,
            socket.gethostname(),
            os.getpid(),
            first,
            "loading",
            models=several,
            version=metadata.version("longhaul"),
        )
        self._since = self._reported = clock()
        self._counted: Mapping[str, float] = {}
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
            running=seen.running,
            **self._figures(seen.engine),
        )
        if self._ledger.fleet.report(present) and seen.state in ("loading", "serving"):
            self._retire("told to")

    def _figures(self, counted: Mapping[str, float]) -> dict[str, Any]:
        """Return rates since the last report, and the shares that the engine's counters tell."""
        before, since = self._counted, self._clock() - self._reported
        self._counted, self._reported = counted, self._reported + since

        def rate(*names: str) -> float:
            # Below 0: another model's engine has begun to count.
            more = sum(counted.get(name, 0) - before.get(name, 0) for name in names)
            return round(max(0.0, more) / since, 3) if since > 0 else 0.0

        reused = counted.get("prefix_tokens_reused", 0)
        return {
            "prompt_tokens_per_second": rate(*_PROMPT),
            "output_tokens_per_second": rate("tokens_sampled"),
            "prefix_hit_ratio": _share(reused, sum(counted.get(name, 0) for name in _PROMPT)),
            "kv_usage_ratio": _share(counted.get("kv_bytes_in_use", 0), counted.get("kv_bytes_budget", 0)),
        }

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


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
