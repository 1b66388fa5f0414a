"""Whose turn it is among the models of a worker: what `swapping` decides by, and what became of each."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

from jobs.ledger_fleet import Waiting
from worker import swapping

log = logging.getLogger(__name__)
PAUSE_SECONDS = 60.0
"""A model that could not be loaded is not tried again for so long, and twice as long each time."""
LONGEST_PAUSE_SECONDS = 3600.0
_NONE = Waiting()


@dataclass
class Model:
    """What a worker knows of one of its models.

    `swaps` are its loads but for a worker's first; what loads took adds up in `loading_seconds`, and
    `swap_seconds` is what the last one cost, the end of the model before it included. `seconds` is the time
    that the worker has been there for it, from one load's beginning to the next one's.
    """

    name: str
    left_at: float = float("-inf")
    swap_seconds: float = 0.0
    loads: int = 0
    swaps: int = 0
    loading_seconds: float = 0.0
    seconds: float = 0.0
    failures: int = 0
    retry_at: float = float("-inf")
    reason: str | None = None


class Turns:
    """The models in order, and which is loaded. A swap is `leave`, `emptied`, then `came` or `failed`."""

    def __init__(
        self, names: Iterable[str], share: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.models = {name: Model(name) for name in names}
        self.loaded: str | None = None
        self.loading: str | None = None
        self.has_work = False
        """Whether the loaded model had work when it was last asked whom to load."""
        self._share, self._clock = share, clock
        self._came = self._worked = self._emptied = self._since = clock()
        self._paying: Model | None = next(iter(self.models.values()), None)
        self._settling = Lock()
        self._tail_seconds = self._owed = 0.0

    @property
    def several(self) -> bool:
        return len(self.models) > 1

    @property
    def longest_swap_seconds(self) -> float:
        """What the model that took longest cost to load last."""
        return max(model.swap_seconds for model in self.models.values())

    @property
    def can_load(self) -> bool:
        """Whether there is a model that could be loaded now."""
        return any(model.retry_at <= self._clock() for model in self.models.values())

    def choose(self, waiting: Mapping[str, Waiting], busy: bool) -> str | None:
        """Return the model to load in place of the one that is, or at first; None: none, or not now."""
        now = self._clock()
        others = [
            swapping.Other(model.name, waiting.get(model.name, _NONE), model.left_at)
            for model in self.models.values()
            if model.name != self.loaded and model.retry_at <= now
        ]
        if self.loaded is None:
            return swapping.first(others)
        mine = waiting.get(self.loaded, _NONE)
        if busy or mine.requests:
            self._worked = now
        turn = swapping.Turn(
            mine,
            busy,
            now - self._worked,
            self.models[self.loaded].swap_seconds,
            self._turn_seconds,
            self._owed - (now - self._came),
        )
        self.has_work = turn.has_work
        return swapping.choose(turn, others)

    def leave(self) -> None:
        """Claim no more for the loaded model: another's turn comes."""
        assert self.loaded is not None
        self.models[self.loaded].left_at = self._clock()

    def emptied(self) -> None:
        """Note that nothing of the loaded model runs any more, nor waits to be written."""
        assert self.loaded is not None
        now, model = self._clock(), self.models[self.loaded]
        # While the last requests ran, fewer and fewer did: half of that time is lost.
        self._tail_seconds = (now - model.left_at) / 2
        self._owed = max(0.0, self._owed - (model.left_at - self._came))
        self._emptied, self.loaded = now, None

    def begin(self, name: str) -> None:
        """Note that a model is about to be loaded."""
        self._settle()
        self.loading, self._paying = name, self.models[name]

    def came(self) -> None:
        """Note that it is loaded."""
        model = self._spent()
        model.swaps += any(each.loads for each in self.models.values())
        model.loads += 1
        model.failures, model.reason, model.retry_at = 0, None, float("-inf")
        self.loaded = model.name
        took = "swap_seconds" if model.swaps else "load_seconds"
        log.info("model came", extra={"model": model.name, took: round(model.swap_seconds, 3)})

    def failed(self, reason: str) -> None:
        """Note that it could not be loaded, and when to try again."""
        model = self._spent()
        pause = min(LONGEST_PAUSE_SECONDS, PAUSE_SECONDS * 2**model.failures)
        model.failures += 1
        model.reason, model.retry_at = reason, self._clock() + pause
        extra = {"model": model.name, "reason": reason, "retry_seconds": pause}
        log.error("model not loaded", extra=extra)

    def told(self) -> dict[str, dict[str, Any]]:
        """Return what became of each model, as JSON values."""
        self._settle()
        return {
            model.name: {
                "state": self._state(model),
                "reason": model.reason,
                "loads": model.loads,
                "swaps": model.swaps,
                "swap_seconds": round(model.swap_seconds, 3),
                "loading_seconds": round(model.loading_seconds, 3),
                "seconds": round(model.seconds, 3),
            }
            for model in self.models.values()
        }

    @property
    def _turn_seconds(self) -> float:
        return swapping.turn_seconds((model.swap_seconds for model in self.models.values()), self._share)

    def _settle(self) -> None:
        """Count the time until now for whose it was."""
        with self._settling:
            now = self._clock()
            if self._paying is not None:
                self._paying.seconds += now - self._since
            self._since = now

    def _spent(self) -> Model:
        """Count what the load took; return the model it was of."""
        assert self.loading is not None
        now, model = self._clock(), self.models[self.loading]
        model.loading_seconds += now - self._emptied
        model.swap_seconds = self._tail_seconds + now - self._emptied
        self._owed = swapping.owed(self._owed, self._turn_seconds, len(self.models))
        self._came = self._worked = self._emptied = now
        self._tail_seconds, self.loading = 0.0, None
        return model

    def _state(self, model: Model) -> str:
        if model.name in (self.loaded, self.loading):
            return "loaded" if model.name == self.loaded else "loading"
        return "unavailable" if model.reason else "unloaded"
