"""The pull service of a worker: threads for the engine, for heartbeats, for units and for reaping."""

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any

from jobs import errors, ids, queue, store, sweeper
from jobs.ledger import Lease, Ledger, Unit
from jobs.records import ResultRow
from jobs.settings import Settings
from worker import spans
from worker.control import PLANS_AT_ONCE, Control
from worker.held import Held
from worker.metrics import endpoint, finished, gpu, state
from worker.models import Models
from worker.presence import Presence, Seen
from worker.watchdog import EXIT_CODE, Watchdog

log = logging.getLogger(__name__)


class Service:
    """Claims, runs and completes requests of its models, and runs the units of jobs, until told to stop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = f"{socket.gethostname()}-{os.getpid()}-{ids.ulid()[-6:]}"
        self.ledger = Ledger.connect(settings)
        self.store = store.open_store(settings)
        self.failed: str | None = None
        self.retired = False
        self._producer = queue.Producer(settings)
        self._spans = spans.open_spans(settings, self.store, self.name)
        self._control = Control(settings, self.ledger, self.store, self._fed, self._unit_ended)
        self._sweeper = sweeper.Sweeper(settings, self.ledger.redis, self.store)
        self._held = Held(self._spans.dropped)
        self._stopping, self._stopped, self._retiring = Event(), Event(), Event()
        self._free_looks = 0
        self._watchdog = Watchdog(settings.step_timeout_seconds, self._end_hung)
        self._models = Models(
            settings,
            self.ledger,
            self.store,
            self.name,
            self._held,
            self._watchdog,
            self._stopping,
            lambda: self._claiming,
            self._guarded,
            self._spans.claimed,
            self._count,
        )
        self._counting = Lock()
        self._completed = self._refused = self._completed_before = 0
        self._presence = Presence(
            self.ledger,
            self.name,
            tuple(self._models.fingerprints.values()),
            self._seen,
            self.retire,
            settings.exit_when_idle_seconds,
        )
        self._started = time.monotonic()
        self._registry = endpoint.registry(settings.models)
        self._finished = finished.Finished(self._registry, settings.served)
        self._units_ended = state.units_ended(self._registry)

    def start(self) -> None:
        """Start the threads; a model is loaded in the engine's. Returns at once."""
        poll = self.settings.poll_seconds
        every = {
            "heartbeat": (self._heartbeat, self.settings.heartbeat_seconds, self._stopped),
            "reaper": (self._control.reap, self.settings.reap_seconds, self._stopping),
            "sweeper": (self._sweeper.turn, self._sweeper.check_seconds, self._stopping),
            "units": (lambda: self._units(besides="plan"), poll / 2, self._stopping),
            # Apart from each other, so that a long plan keeps neither the engine without requests nor a job
            # that has run from its end. Of planners one more than a tenant may have: it is for the others.
            **{
                f"planner-{number}": (lambda: self._units("plan"), poll / 2, self._stopping)
                for number in range(PLANS_AT_ONCE + 1)
            },
            "feeder": (lambda: self._units("feed"), poll / 4, self._stopping),
            "presence": (self._presence.report, self.settings.heartbeat_seconds, self._stopped),
            "idleness": (self._watch_idleness, poll / 2, self._stopping),
        }
        for name, (call, seconds, until) in every.items():
            Thread(target=self._repeat, args=(call, seconds, until), name=name, daemon=True).start()
        Thread(target=self._guarded, args=(self._control.warm,), name="warm", daemon=True).start()
        self._serve_metrics()
        Thread(target=self._guarded, args=(self._presence.report,), name="first-report", daemon=True).start()
        target = self._serve if self.settings.served else self._serve_control
        Thread(target=target, name="engine", daemon=True).start()

    def begin_stop(self) -> None:
        """Stop claiming and drain; returns at once, and may be called again."""
        if not self._stopping.is_set():
            self._models.stop_at = time.monotonic() + self.settings.drain_seconds
            self._completed_before = self._completed
            self._stopping.set()
            self._sweeper.stopping.set()
            self._models.wake.set()
            log.info("draining", extra={"held": len(self._held)})

    def retire(self, reason: str) -> None:
        """Claim nothing more; once nothing is held any more, `retired` says that the worker may end."""
        if not self._retiring.is_set():
            log.info("retiring", extra={"reason": reason, "held": len(self._held)})
            self._retiring.set()
            self._models.wake.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the service has stopped; tell whether it has."""
        return self._stopped.wait(timeout)

    def wake(self) -> None:
        """Look for requests now."""
        self._models.wake.set()

    @property
    def loading(self) -> bool:
        """Whether no model is loaded, yet or at the moment: no request is leased."""
        return self._loading and not self._stopped.is_set()

    def run_unit(self, kind: str, job_id: str) -> bool:
        """Run one unit of that kind: the job's own, or a plan of the tenant whose turn it is."""
        mine = None if kind == "plan" else job_id
        return self._claiming and self._control.run_unit(kind, mine)

    def ending(self) -> dict[str, int]:
        """Return what became of the requests that were held when it was told to stop.

        They were finished and written, or given back; what is left goes to others when its leases run out.
        """
        serving = self._models.serving
        return {
            "finished": self._completed - self._completed_before,
            "given_back": serving.puller.given_back if serving else 0,
            "left_to_expire": len(self._held),
        }

    def stats(self) -> dict[str, Any]:
        """Return what the service and its engine are doing, as JSON values."""
        serving, turns = self._models.serving, self._models.turns
        groups = self._models.groups
        return {
            "worker": self.name,
            "state": self._state(),
            "model": self._models.name,
            "models": {name: its | {"groups": groups[name]} for name, its in turns.told().items()},
            "running": len(serving.engine.running) if serving else 0,
            "slots": serving.engine.config.max_running if serving else None,
            "held": len(self._held),
            "groups": groups.total(),
            "completed": self._completed,
            "refused": self._refused,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "engine": self._models.stats(),
            "unloaded": self._models.unloaded(),
        }

    def _state(self) -> str:
        if self._stopping.is_set():
            return "stopped" if self._stopped.is_set() else "draining"
        if self._retiring.is_set():
            return "retiring"
        return "loading" if self._loading else "serving"

    @property
    def _loading(self) -> bool:
        return bool(self.settings.served) and self._models.serving is None

    def _serve_metrics(self) -> None:
        self._registry.register(state.State(self.stats, self.settings.cost_per_hour))
        cards = gpu.Gpus.found() if self.settings.served and self.settings.device != "cpu" else None
        if cards is not None:
            self._registry.register(cards)
        endpoint.Endpoint(self._registry, self.settings.metrics_host, self.settings.metrics_port)

    @property
    def _claiming(self) -> bool:
        return not (self._stopping.is_set() or self._retiring.is_set())

    def _seen(self) -> Seen:
        serving, name = self._models.serving, self._models.name
        capacity = serving.engine.config.max_running if serving else self.settings.max_running
        uses = self._models.groups.total() + self._control.claimed
        model = self._models.fingerprints[name] if name else None
        held, units = len(self._held), self._control.held
        running = len(serving.engine.running) if serving else 0
        counted, failing = self._models.stats() or {}, self._models.unavailable
        return Seen(self._state(), held, units, uses, capacity, model, failing, running, counted)

    def _watch_idleness(self) -> None:
        self._presence.watch()
        # A unit may have been claimed just before this was heard: it shows at the second look.
        free = self._retiring.is_set() and not self._control.held
        self._free_looks = self._free_looks + 1 if free else 0
        self.retired = self._free_looks > 1 and (self._models.empty.is_set() or self._models.serving is None)

    def _serve(self) -> None:
        try:
            self._models.run()
        except errors.LonghaulError as error:
            self.failed = errors.advised(error, "Check LONGHAUL_MODELS.")
        except Exception as error:
            # First, and with what there is: when memory is what is missing, its holders are in the frames.
            self.failed = "The engine thread ended."
            traceback.clear_frames(error.__traceback__)
            log.exception("the engine thread ended")
            self.failed = f"The engine thread ended: {error!r}."
        finally:
            self._watchdog.close()
            if self.failed:
                self._guarded(self._models.save)
            self._spans.close()
            self._guarded(self._presence.leave)
            self._stopped.set()

    def _serve_control(self) -> None:
        log.info("serving", extra={"model": None, "worker": self.name})
        self._stopping.wait()
        self._spans.close()
        self._guarded(self._presence.leave)
        self._stopped.set()

    def _count(self, model: str, rows: list[ResultRow], leases: list[Lease], refused: int) -> None:
        with self._counting:
            self._completed += len(rows)
            self._refused += refused
        self._spans.written(rows, leases)
        self._guarded(lambda: self._finished.count(model, rows, refused))

    def _unit_ended(self, unit: Unit, began: float, error: str | None) -> None:
        if unit.kind != "feed":  # so many and so short: the groups say what they did
            self._spans.unit(unit.kind, unit.job_id, began, unit.attempts, error)
        outcome = {None: "done", "LeaseLost": "lost"}.get(error, "failed")
        self._units_ended.labels(unit.kind, outcome).inc()

    def _end_hung(self, seconds: float) -> None:
        """End the process. In a thread of its own what can be saved is: the engine may hold any lock."""
        self._stopping.set()
        saving = Thread(target=self._last_words, args=(seconds,), name="saving", daemon=True)
        saving.start()
        saving.join(self.settings.drain_seconds)
        os._exit(EXIT_CODE)

    def _last_words(self, seconds: float) -> None:
        reason = f"The engine has been in one step for {seconds:.0f} s (LONGHAUL_STEP_TIMEOUT_SECONDS)"
        print(f"longhaul: {reason}; the process ends.", file=sys.stderr, flush=True)
        log.critical("the engine hangs", extra={"seconds": round(seconds, 1), "stacks": _stacks()})
        self._guarded(self._models.save)
        serving = self._models.serving
        running = sorted(serving.engine.running) if serving else []
        log.critical("ending the process", extra={"running": running, "left_to_expire": len(self._held)})

    def _heartbeat(self) -> None:
        self._control.extend()
        leases = self._held.all()
        for fingerprint in {lease.fingerprint for lease in leases}:
            self._extend(fingerprint, [lease for lease in leases if lease.fingerprint == fingerprint])

    def _extend(self, fingerprint: str, leases: list[Lease]) -> None:
        lost = set(self.ledger.extend(fingerprint, leases))
        if lost and (serving := self._models.serving):
            serving.puller.cancel(lease for lease in leases if lease.request.id in lost)

    def _units(self, kind: str | None = None, besides: str | None = None) -> None:
        while self._claiming and self._control.run_unit(kind, besides=besides):
            pass

    def _fed(self, fingerprint: str) -> None:
        if fingerprint in self._models.fingerprints.values():
            self._models.wake.set()
        serving = self._models.serving
        if serving is None or serving.fingerprint != fingerprint:
            self._producer.send(queue.WAKE, fingerprint)

    def _repeat(self, call: Callable[[], None], seconds: float, until: Event) -> None:
        while not until.wait(seconds):
            self._guarded(call)

    def _guarded(self, call: Callable[[], object]) -> object:
        """Run one turn of a loop that must outlive whatever Redis and the store do; return its answer."""
        try:
            return call()
        except Exception as error:
            log.warning("turn failed", extra={"turn": getattr(call, "__name__", "turn")}, exc_info=error)
            self._stopped.wait(min(1.0, self.settings.poll_seconds))
            return None


def _stacks() -> dict[str, list[str]]:
    """Return where the threads are that run a model."""
    frames = sys._current_frames()
    found = [thread for thread in threading.enumerate() if thread.name in ("engine", "generate")]
    return {
        thread.name: [line.strip() for line in traceback.format_stack(frames[thread.ident])]
        for thread in found
        if thread.ident in frames
    }
