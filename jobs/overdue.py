"""Workers that get nowhere: for how long each has been loading, or has not reported."""

from collections.abc import Iterable
from dataclasses import dataclass

from jobs.ledger_fleet import Present
from jobs.settings import Settings
from jobs.slots import Slot

STARTUPS = 5
"""A start-up takes no longer than so many of those that were measured."""
LOADING, SILENT = "loading", "silent"


@dataclass
class Wait:
    """What is waited for (LOADING or SILENT: its report), and for how long it has been."""

    kind: str
    seconds: float = 0.0


class Overdue:
    """Adds up time as it was seen to pass, so that nobody is late who was stopped along with the autoscaler.

    Workers of this machine are known by their slots, others by their names. `silent_seconds` without a report
    make a slot silent.
    """

    def __init__(self, settings: Settings, silent_seconds: float) -> None:
        self._startup_limit = settings.scale_startup_limit_seconds
        self._silent_seconds = max(silent_seconds, settings.lease_seconds)
        self._silent_limit = settings.step_timeout_seconds
        self._waits: dict[object, Wait] = {}

    def look(
        self, slots: Iterable[Slot], present: Iterable[Present], others: Iterable[Present], passed: float
    ) -> None:
        """Note what the workers of slots and those of others report, `passed` seconds after the last look."""
        states: dict[int | None, str] = {each.pid: each.state for each in present}
        kinds: dict[object, str] = {each.name: LOADING for each in others if each.state == "loading"}
        for slot in slots:
            if slot.worker is None:
                continue
            slot.reported = states.get(slot.pid)
            if slot.starting or slot.reported == "loading":
                kinds[slot.name, slot.pid] = LOADING
            elif slot.reported is None:
                kinds[slot.name, slot.pid] = SILENT
        self._waits = {key: self._longer(key, kind, passed) for key, kind in kinds.items()}
        for slot in slots:
            wait = self._waits.get((slot.name, slot.pid))
            slot.silent = wait is not None and wait.kind == SILENT and wait.seconds >= self._silent_seconds

    def hung(self, slot: Slot, startup_seconds: float) -> Wait | None:
        """Return what is waited for of the worker in this slot, if that takes too long."""
        wait = self._waits.get((slot.name, slot.pid)) if slot.worker else None
        if wait is None or slot.hung:
            return None
        if wait.kind == LOADING:
            return wait if self._too_long(wait, startup_seconds) else None
        limit = max(self._silent_limit, 2 * self._silent_seconds)
        return wait if self._silent_limit and wait.seconds > limit else None

    def loads(self, other: Present, startup_seconds: float) -> bool:
        """Whether a worker that others started loads, and not for too long."""
        wait = self._waits.get(other.name)
        return other.state == "loading" and not (wait and self._too_long(wait, startup_seconds))

    def _too_long(self, wait: Wait, startup_seconds: float) -> bool:
        limit = max(self._startup_limit, STARTUPS * startup_seconds)
        return self._startup_limit > 0 and wait.seconds > limit

    def _longer(self, key: object, kind: str, passed: float) -> Wait:
        before = self._waits.get(key)
        return Wait(kind, before.seconds + passed) if before and before.kind == kind else Wait(kind)
