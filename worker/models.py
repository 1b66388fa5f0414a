"""Loads the models of a worker, one at a time, and pulls requests for the one that is loaded."""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from threading import Event

import redis

from jobs import errors
from jobs.ledger import Group, Lease, Ledger
from jobs.ledger_fleet import Waiting
from jobs.records import ResultRow
from jobs.settings import Settings
from jobs.store import ObjectStore
from worker import engine
from worker.flusher import Flusher
from worker.held import Held
from worker.metrics import counters
from worker.puller import Puller
from worker.serving import FLUSH_SHARE, Serving
from worker.turns import Turns
from worker.watchdog import Watchdog

log = logging.getLogger(__name__)
Guarded = Callable[[Callable[[], object]], object]
OnCounted = Callable[[str, list[ResultRow], list[Lease], int], None]


class Models:
    """The models of one worker. `run` is its engine thread's work; the rest may be called from any thread.

    `stopping` tells it to drain until `stop_at`, `claiming` whether it may claim; `empty` is set when it may
    not and holds nothing any more, and `wake` makes it look around.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        store: ObjectStore,
        worker: str,
        held: Held,
        watchdog: Watchdog,
        stopping: Event,
        claiming: Callable[[], bool],
        guarded: Guarded,
        on_claimed: Callable[[int, Group], None],
        on_counted: OnCounted,
    ) -> None:
        self._settings, self._ledger, self._store, self._worker = settings, ledger, store, worker
        self._held, self._watchdog, self._stopping = held, watchdog, stopping
        self._claiming, self._guarded = claiming, guarded
        self._on_claimed, self._on_counted = on_claimed, on_counted
        self.fingerprints = {name: settings.fingerprints[name] for name in settings.served}
        self.turns = Turns(settings.served, settings.swap_share)
        self.serving: Serving | None = None
        self.stop_at = float("inf")
        self.empty, self.wake = Event(), Event()
        self.groups = Counter(dict.fromkeys(settings.served, 0))
        self._past: dict[str, dict[str, float]] = {}
        self._look_at = 0.0

    @property
    def name(self) -> str | None:
        """The model that is loaded, or is being loaded."""
        return self.turns.loaded or self.turns.loading or next(iter(self.fingerprints), None)

    def run(self) -> None:
        """Serve one model after the other until told to stop; raises what the engine does, and
        ModelUnavailable when none can be loaded.
        """
        self._watchdog.start()
        name = self._first()
        while name is not None:
            name = self._turn_of(name)
            if self._stopping.is_set():
                return
            engine.free_memory()
            name = name or self._first()

    @property
    def unavailable(self) -> dict[str, str]:
        """Why models could not be loaded, by fingerprint."""
        return {
            self.fingerprints[name]: model.reason for name, model in self.turns.models.items() if model.reason
        }

    def stats(self) -> dict[str, float] | None:
        """Return what the loaded model's engines have counted since the worker started."""
        serving = self.serving
        return None if serving is None else self._counted(serving)

    def unloaded(self) -> dict[str, dict[str, float]]:
        """Return the same of models that were loaded before."""
        serving = self.serving
        return {name: its for name, its in self._past.copy().items() if not serving or serving.name != name}

    def save(self) -> None:
        """Write what is finished and give back what only waited; for a process that is about to end."""
        if (serving := self.serving) is not None:
            serving.save(self._settings.drain_seconds * (1 - FLUSH_SHARE))

    def _counted(self, serving: Serving) -> dict[str, float]:
        return counters.added(asdict(serving.engine.stats), self._past.get(serving.name, {}))

    def _first(self) -> str | None:
        """Return whom to load when nothing is loaded."""
        return self.turns.choose(self._waiting() or {}, busy=False)

    def _turn_of(self, name: str) -> str | None:
        """Load a model and serve it until another's turn comes; return that. Nothing of it stays."""
        serving = self._open(name)
        if serving is None:
            return None
        self.serving = serving
        after = self._serve(serving)
        if after is None:
            serving.drain(self._guarded, self.stop_at, self._settings.drain_seconds * FLUSH_SHARE)
            log.info("drained", extra={"left_to_expire": len(self._held)})
        else:
            self.turns.emptied()
            counted = self._counted(serving)
            self.serving = None
            self._past[name] = counted  # only now: what both said would be counted twice
        serving.engine.close()
        return after

    def _open(self, name: str) -> Serving | None:
        self.turns.begin(name)
        try:
            opened = engine.open_engine(name, self._settings.models[name], self._settings)
        except Exception as error:
            self.turns.failed(errors.advised(error, "Check LONGHAUL_MODELS.") or repr(error))
            if not self.turns.can_load:
                raise
            # What was loaded so far is in the frames; the next model needs its memory.
            traceback.clear_frames(error.__traceback__)
            return None
        serving = self._around(name, opened)
        self.turns.came()
        return serving

    def _around(self, name: str, opened: engine.Engine) -> Serving:
        fingerprint = self.fingerprints[name]
        flusher = Flusher(
            self._settings,
            self._ledger,
            self._store,
            self._held,
            fingerprint,
            self.wake.set,
            lambda rows, leases, refused: self._on_counted(name, rows, leases, refused),
        )
        flusher.start()
        puller = Puller(
            opened,
            self._ledger,
            fingerprint,
            self._held,
            flusher,
            self._worker,
            self._watchdog,
            lambda number, group: self._claimed(name, number, group),
            groups=self.groups.total(),
        )
        return Serving(name, fingerprint, opened, flusher, puller, self._held)

    def _claimed(self, name: str, number: int, group: Group) -> None:
        self.groups[name] += 1
        self._on_claimed(number, group)

    def _serve(self, serving: Serving) -> str | None:
        """Pull until told to stop (None), or until another model's turn has come and nothing is held."""
        log.info("serving", extra={"model": serving.fingerprint, "worker": self._worker})
        while not self._stopping.is_set():
            after = self._due(serving)
            if after is not None and self._leave(serving, after):
                return after
            claiming = self._claiming()
            if not serving.puller.turn(claiming):
                if not claiming and not len(self._held):
                    self.empty.set()
                self._wait()
        return None

    def _due(self, serving: Serving) -> str | None:
        """Return the model whose turn it is; None: it stays as it is. Looks at Redis, rarely while busy."""
        busy, now = serving.puller.busy, time.monotonic()
        if not self.turns.several or not self._claiming() or (busy and now < self._look_at):
            return None
        self._look_at = now + self._settings.poll_seconds
        waiting = self._waiting()
        if waiting is None:
            return None
        after = self.turns.choose(waiting, busy)
        while after is not None and self._another_loads(after, waiting[after]):
            waiting[after] = Waiting()
            after = self.turns.choose(waiting, busy)
        return after

    def _another_loads(self, name: str, waiting: Waiting) -> bool:
        """Whether another worker has just begun to load a model of which it can run all that waits."""
        if waiting.requests > self._settings.max_running:
            return False
        seconds = max(self._settings.lease_seconds, 2 * self.turns.longest_swap_seconds)
        try:
            load = f"load:{self.fingerprints[name]}"
            return not self._ledger.fleet.take_turn(load, self._worker, seconds)
        except redis.RedisError:  # whoever loads it now could claim nothing
            return True

    def _leave(self, serving: Serving, after: str) -> bool:
        reason = "its turn is over" if self.turns.has_work else "it has no work"
        log.info("swapping", extra={"model": serving.name, "to": after, "reason": reason})
        self.turns.leave()
        return serving.finish(self._wait, self._claiming)

    def _waiting(self) -> dict[str, Waiting] | None:
        """Return what waits of each model; None: Redis does not say."""
        if not self.turns.several:
            return {}
        try:
            found = self._ledger.fleet.waiting(self.fingerprints.values())
        except redis.RedisError as error:
            log.warning("not swapped: Redis does not answer", extra={"reason": str(error)})
            return None
        return {name: found[fingerprint] for name, fingerprint in self.fingerprints.items()}

    def _wait(self) -> None:
        self.wake.wait(self._settings.poll_seconds)
        self.wake.clear()
