"""The loop of `longhaul autoscale`: look at the ledger, decide by `jobs.scaling`, start, retire workers."""

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import redis

from jobs import complaints, errors, ids, overdue, scaling
from jobs.autoscale_lines import Change, told
from jobs.ledger_fleet import Fleet, Load, Present
from jobs.scaled import FIRST_STARTUP_SECONDS, Scaled, depth_of, tokens_left
from jobs.settings import Settings
from jobs.slots import Slot, locked

Report = Callable[[str, dict[str, Any]], None]
"""Hears of each event: its name, and what is known of it."""
TURN_SECONDS = 300.0
"""How long work of a model without any worker waits before another model gives up a slot."""
LONGEST_LOOK_SECONDS = 30.0
"""After a longer pause between two looks the autoscaler itself was stopped: what passed tells nothing."""


class NoSlotLeft(errors.LonghaulError):
    """No slot is left: workers ended again and again, and nothing will be started. The reasons are above."""


class Autoscaler:
    """Looks and acts once each `turn`. All threads of workers belong to the thread that calls it.

    `control` is the slot of a worker for control alone, which several models need: before a job is planned
    nobody knows whose it is.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        slots: Sequence[Slot],
        policy: scaling.Policy,
        report: Report,
        control: Slot | None = None,
        dry: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._slots, self._policy, self._report = fleet, list(slots), policy, report
        self._control, self._dry, self._clock = control, dry, clock
        self._host = socket.gethostname()
        self._name = f"{self._host}-{ids.ulid()}"
        # Longer than it takes what one does to show in the reports that another reads.
        self._turn_seconds = 3 * settings.heartbeat_seconds
        each = {name: (name,) for name in settings.models}
        groups = each if settings.model is None else {settings.model: settings.served}
        self._models = [
            Scaled(name, tuple(settings.fingerprints[each] for each in served), capacity=settings.max_running)
            for name, served in groups.items()
            if served
        ]
        for model in self._models:
            model.pace.rate, startup = fleet.pace(model.fingerprint)
            model.startup_seconds = startup or FIRST_STARTUP_SECONDS
        self._away = self._looked = False
        self._told: dict[str | None, tuple[int, int]] = {}
        self._ended: set[int | None] = set()
        self._silent_seconds = 4 * settings.heartbeat_seconds
        self._complaints = complaints.Complaints(
            {fingerprint: name for name, fingerprint in settings.fingerprints.items()}, report
        )
        self._overdue = overdue.Overdue(settings, self._silent_seconds)
        self._last = clock()

    @property
    def slots(self) -> list[Slot]:
        return self._slots + ([self._control] if self._control else [])

    def lock(self) -> None:
        """Keep others from the slots of models; raises SlotTaken."""
        for slot in self._slots:
            slot.lock()

    def turn(self) -> None:
        """Look and act; raises NoSlotLeft. With no Redis, all stays as it is."""
        self._looked = True
        now = self._clock()
        passed, self._last = now - self._last, now
        if passed > LONGEST_LOOK_SECONDS:
            passed = LONGEST_LOOK_SECONDS
            self._forget()
        for slot in self.slots:
            self._look_at(slot)
        self._check_slots()
        try:
            loads, units = self._fleet.load([name for model in self._models for name in model.models])
            present = self._living()
            self._complaints.look(self._fleet.failing(), present)
            if self._away:
                self._report("redis_back", {})
            self._away = False
            self._watch(present, passed)
            self._scale(loads, units, present, passed)
        except redis.RedisError as error:
            if not self._away:
                self._report("redis_away", {"reason": f"{error}; all stays as it is"})
            self._away = True
            self._forget()

    def _forget(self) -> None:
        """Learn nothing from what finishes until the next look: it takes longer than a turn."""
        for model in self._models:
            model.seen = None

    def _living(self) -> list[Present]:
        """Return the workers that report, without those of ours that are known to have ended."""
        found = []
        for each in self._fleet.present():
            if each.host == self._host and each.pid in self._ended:
                self._fleet.leave(each.name)
            elif each.age_seconds <= self._silent_seconds:
                found.append(each)
        return found

    def _watch(self, present: list[Present], passed: float) -> None:
        """End workers that get nowhere; tell those to retire again that a Redis which lost all did not."""
        own = [each for each in present if self._own(each)]
        others = [each for each in present if not self._own(each)]
        self._overdue.look(self.slots, own, others, passed)
        lost = {slot.pid for slot in self.slots if slot.retiring and slot.reported in ("loading", "serving")}
        if lost and not self._dry:
            self._fleet.retire([each.name for each in own if each.pid in lost])
        startups = {model.name: model.measured_startup for model in self._models}
        for slot in self.slots:
            if wait := self._overdue.hung(slot, startups.get(slot.model or "", 0.0)):
                facts = {"slot": slot.name, "model": slot.model, "seconds": round(wait.seconds)}
                self._report("hung", facts | {"reason": wait.kind})
                slot.end_hung()

    def _own(self, each: Present) -> bool:
        return each.host == self._host and any(slot.worker and slot.pid == each.pid for slot in self.slots)

    def _look_at(self, slot: Slot) -> None:
        seconds = slot.served()
        if seconds is not None:
            for model in self._models:
                if model.name == slot.model:
                    model.started(seconds)
            facts = {"slot": slot.name, "model": slot.model, "seconds": round(seconds, 1)}
            self._report("serving", facts | {"metrics": slot.metrics})
        pid, end = slot.pid, slot.ended()
        if end is not None:
            self._ended.add(pid)
            self._report(*told(slot, end))

    def _check_slots(self) -> None:
        places = [(slot, model.name) for slot in self._slots for model in self._models]
        given_up = [slot.given_up(name) for slot, name in places]
        if not self._models and self._control:
            given_up = [self._control.given_up(None)]
        if all(given_up) and not any(slot.worker for slot in self.slots):
            raise NoSlotLeft

    def _scale(self, loads: dict[str, Load], units: int, present: list[Present], passed: float) -> None:
        wanted, reasons, elsewhere = {}, {}, {}
        own = units if len(self._models) == 1 else 0
        for model in self._models:
            load = model.load(loads)
            decision, others = self._decide(model, load, own, present, passed)
            wanted[model.name], reasons[model.name] = max(0, decision.count - others), decision.reason
            elsewhere[model.name] = others
        given = self._share(wanted)
        for model in self._models:
            change = Change(model.name, elsewhere[model.name], reasons[model.name])
            self._move(model, given[model.name], change, present)
        if self._control is not None:
            self._scale_control(units, present)

    def _decide(
        self, model: Scaled, load: Load, units: int, present: list[Present], passed: float
    ) -> tuple[scaling.Decision, int]:
        """Return what the policy wants, and how many of those are workers that others started."""
        its = [each for each in present if each.serves(model.models)]
        model.learn(load, passed, its)
        self._note(model)
        others = [each for each in its if not self._own(each)]
        serving = sum(each.state == "serving" for each in others)
        loading = sum(self._overdue.loads(each, model.measured_startup) for each in others)
        own = [slot for slot in self._slots if slot.model == model.name]
        workers = model.workers(
            serving + sum(slot.serving for slot in own), loading + sum(slot.starting for slot in own)
        )
        policy = replace(self._policy, most=self._policy.most + serving + loading)
        depth = depth_of(load, units)
        decision = scaling.desired(depth, tokens_left(load), model.pace.rate, workers, policy)
        model.spare_seconds = scaling.spare(decision, workers.count, model.spare_seconds, passed)
        waits = depth.open and not workers.count
        model.waiting_seconds = model.waiting_seconds + passed if waits else 0.0
        return decision, serving + loading

    def _note(self, model: Scaled) -> None:
        """Leave what was learned for the next autoscaler, when it has changed; a full Redis does without."""
        learned = (model.pace.rate, model.startup_seconds)
        if model.pace.rate is not None and learned != model.noted:
            with contextlib.suppress(redis.OutOfMemoryError):
                self._fleet.note_pace(model.fingerprint, model.pace.rate, model.startup_seconds)
            model.noted = learned

    def _share(self, wanted: dict[str, int]) -> dict[str, int]:
        held = {name: sum(_works(slot, name) for slot in self._slots) for name in wanted}
        waiting = {model.name: model.waiting_seconds for model in self._models}
        usable = [slot for slot in self._slots if slot.worker or any(map(slot.may_start, wanted))]
        slots = min(self._policy.most, len(usable))
        if sum(held.values()) >= slots:
            turns = {model.name: max(TURN_SECONDS, 5 * model.startup_seconds) for model in self._models}
            wanted = {
                name: count if held[name] or waiting[name] >= turns[name] else 0
                for name, count in wanted.items()
            }
        return scaling.share(wanted, waiting, held, slots)

    def _move(self, model: Scaled, count: int, change: Change, present: list[Present]) -> None:
        held = [slot for slot in self._slots if _works(slot, model.name)]
        have = len(held)
        if self._dry:
            self._would(change, have, count)
            return
        free = [slot for slot in self._slots if slot.may_start(model.name)]
        new = free[: max(0, count - have)]
        gone = self._chosen(held, have - count, present)
        if not (new or gone) or not self._fleet.take_turn(model.fingerprint, self._name, self._turn_seconds):
            return
        self._report("scale", change.told(have, have + len(new) - len(gone)))
        for slot in new:
            self._start(slot, model.name)
        self._retire(gone)

    def _would(self, change: Change, have: int, count: int) -> None:
        """Say, once, what would be done, if anything would."""
        told = (have + change.others, count + change.others)
        if count != have and told != self._told.get(change.model):
            self._report("would_scale", change.told(*told) | {"others": 0})
        self._told[change.model] = told

    def _start(self, slot: Slot, model: str | None) -> None:
        slot.start(model)
        if slot.worker is not None:  # otherwise the next look says why
            self._ended.discard(slot.pid)  # numbers of processes come again
            self._report("start", {"slot": slot.name, "model": model, "pid": slot.pid})

    def _chosen(self, held: list[Slot], count: int, present: list[Present]) -> list[tuple[Slot, Present]]:
        """Choose who retires: idle ones first, then who holds least. Who never reported is left alone."""
        by_pid = {each.pid: each for each in present if each.host == self._host}
        known = [(slot, by_pid[slot.pid]) for slot in held if slot.pid in by_pid]
        known.sort(key=lambda pair: (pair[1].held + pair[1].units, pair[0].starting, -pair[1].idle_seconds))
        return known[: max(0, count)]

    def _retire(self, chosen: list[tuple[Slot, Present]]) -> None:
        if not chosen:
            return
        self._fleet.retire([each.name for _, each in chosen])
        for slot, each in chosen:
            slot.retiring = True
            facts = {"slot": slot.name, "model": slot.model, "held": each.held}
            self._report("retire", facts)

    def _scale_control(self, units: int, present: list[Present]) -> None:
        """Have somebody for the units of jobs while no model has a worker."""
        slot = self._control
        assert slot is not None
        others = [each for each in present if each.pid != slot.pid and each.state in ("loading", "serving")]
        starting = any(each.worker and not each.retiring for each in self._slots)
        wanted = units and not others and not starting and slot.may_start(None)
        change = Change(None, 0, scaling.open_units(units))
        if self._dry:
            self._would(change, 0, int(bool(wanted)))
        elif wanted and locked(slot):
            self._report("scale", change.told(0, 1))
            self._start(slot, None)
        its = [each for each in present if each.pid == slot.pid and each.host == self._host]
        serving = any(each.state == "serving" for each in others)
        if slot.serving and its and not its[0].units:
            idle = its[0].idle_seconds >= self._policy.idle_seconds and not units
            if idle or serving:
                why = "nothing is left" if idle else "others run the units of jobs"
                self._report("scale", Change(None, 0, why).told(1, 0))
                self._retire([(slot, its[0])])

    def begin_stop(self) -> None:
        """Have all workers drain; returns at once, and may be called from a signal handler."""
        for slot in self.slots:
            slot.terminate()

    def stop(self) -> None:
        """Have all workers drain, and wait for them. A second interruption kills the rest."""
        running = [slot for slot in self.slots if slot.worker]
        given_back = 0
        if running:
            self._report("stopping", {"workers": len(running), "reason": "told to stop; they drain"})
        try:
            self.begin_stop()
            for slot in running:
                given_back += slot.stop()
        finally:
            for slot in self.slots:
                slot.kill()
                slot.unlock()
            if self._looked:  # otherwise an error says why it did not even begin
                self._report("stopped", {"workers": len(running), "given_back": given_back})


def _works(slot: Slot, name: str) -> bool:
    return slot.worker is not None and not (slot.retiring or slot.silent) and slot.model == name
