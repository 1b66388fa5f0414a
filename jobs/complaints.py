"""What workers say that keeps work from being done; `longhaul autoscale` repeats it, once while it lasts."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jobs.ledger_fleet import Present
from jobs.ledger_types import Failing

Report = Callable[[str, dict[str, Any]], None]


class Complaints:
    """`names`: fingerprint -> name of the models that are served."""

    def __init__(self, names: Mapping[str, str], report: Report) -> None:
        self._names, self._report = names, report
        self._steps: set[tuple[str, str]] = set()
        self._models: set[tuple[str, str]] = set()

    def look(self, failing: Iterable[Failing], present: Iterable[Present]) -> None:
        """Say what is new: of the steps of jobs that fail, for the same reason, the first."""
        steps = {(one.kind, one.reason): one for one in failing}
        models = {pair: pair for one in present for pair in one.unavailable.items()}
        for key, one in steps.items():
            if key not in self._steps:
                facts = {"unit": one.kind, "job": one.job_id, "failures": one.failures, "reason": one.reason}
                self._report("unit_fails", facts)
        for fingerprint, reason in models.keys() - self._models:
            name = self._names.get(fingerprint, fingerprint)
            self._report("not_loaded", {"model": name, "reason": reason})
        # Of steps only some are told of: one that is not seen may still fail while any does.
        self._steps = self._steps | steps.keys() if steps else set()
        self._models = set(models)
