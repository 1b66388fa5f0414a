"""A model that is scaled: what is known of its workers and its work, as `jobs.scaling` wants it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from jobs import scaling
from jobs.ledger_fleet import Load, Present

FIRST_STARTUP_SECONDS = 60.0
"""What a start-up is taken for before one was seen."""
_WEIGHT = 0.5


@dataclass
class Scaled:
    """A model that is scaled, with what was learned of it; or several (fingerprints) that its workers swap
    between. `name` is what LONGHAUL_MODEL calls it.
    """

    name: str
    models: tuple[str, ...]
    pace: scaling.Pace = field(default_factory=scaling.Pace)
    startup_seconds: float = FIRST_STARTUP_SECONDS
    spare_seconds: float = 0.0
    waiting_seconds: float = 0.0
    capacity: int = 1
    seen: Load | None = None
    noted: tuple[float | None, float] = (None, 0.0)

    @property
    def fingerprint(self) -> str:
        """What it is known by in Redis."""
        return ",".join(self.models)

    def load(self, loads: Mapping[str, Load]) -> Load:
        """Return what is left of it."""
        return total([loads[name] for name in self.models])

    def learn(self, load: Load, passed: float, its: list[Present]) -> None:
        """Note what has finished since the last look, and what its workers report."""
        if capacities := [each.capacity for each in its if each.state == "serving"]:
            self.capacity = max(1, *capacities)
        busy = sum(each.held > 0 for each in its if each.model in self.models)
        before = self.seen or load
        done = load.prompt + load.completion - before.prompt - before.completion
        self.pace.add(passed, max(0, done), busy, load.queued)
        self.seen = load

    def workers(self, serving: int, starting: int) -> scaling.Workers:
        """Return so many workers as the policy sees them."""
        return scaling.Workers(
            serving,
            starting,
            self.capacity,
            self.startup_seconds,
            self.spare_seconds,
            self.pace.stalled_seconds,
        )

    @property
    def measured_startup(self) -> float:
        """How many seconds a start takes, 0 while none was seen."""
        return 0.0 if self.startup_seconds == FIRST_STARTUP_SECONDS else self.startup_seconds

    def started(self, seconds: float) -> None:
        """Note how long a worker took from its start until it served."""
        first = self.startup_seconds == FIRST_STARTUP_SECONDS
        self.startup_seconds += (1.0 if first else _WEIGHT) * (seconds - self.startup_seconds)


def total(loads: Sequence[Load]) -> Load:
    """Return several models' load as one; deadlines the first first."""
    if len(loads) == 1:
        return loads[0]
    names = [field.name for field in fields(Load) if field.name != "due"]
    due = sorted((one for load in loads for one in load.due), key=lambda one: one.seconds)
    return Load(**{name: sum(getattr(load, name) for load in loads) for name in names}, due=tuple(due))


def tokens_left(load: Load) -> float:
    """Return the tokens that are left to compute: prompts, and outputs as long as those so far."""
    rows = max(1, load.finished)
    prompts = load.tokens or (load.queued + load.leased) * load.prompt / rows
    return prompts + (load.queued + load.leased) * load.completion / rows


def depth_of(load: Load, units: int) -> scaling.Depth:
    """Return a load as the policy sees it."""
    output = load.completion / max(1, load.finished)
    due = tuple((one.seconds, one.tokens + one.rows * output) for one in load.due)
    return scaling.Depth(load.queued, load.leased, units, due)
