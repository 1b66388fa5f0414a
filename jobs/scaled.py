"""A model that is scaled: what is known of its workers and its work, as `jobs.scaling` wants it."""

from dataclasses import dataclass, field

from jobs import scaling
from jobs.ledger_fleet import Load, Present

FIRST_STARTUP_SECONDS = 60.0
"""What a start-up is taken for before one was seen."""
_WEIGHT = 0.5


@dataclass
class Scaled:
    """A model that is scaled, with what was learned of it."""

    name: str
    fingerprint: str
    pace: scaling.Pace = field(default_factory=scaling.Pace)
    startup_seconds: float = FIRST_STARTUP_SECONDS
    spare_seconds: float = 0.0
    waiting_seconds: float = 0.0
    capacity: int = 1
    seen: Load | None = None
    told: tuple[int, int] = (0, 0)
    noted: tuple[float | None, float] = (None, 0.0)

    def learn(self, load: Load, passed: float, its: list[Present]) -> None:
        """Note what has finished since the last look, and what its workers report."""
        if capacities := [each.capacity for each in its if each.state == "serving"]:
            self.capacity = max(1, *capacities)
        busy = sum(each.held > 0 for each in its)
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

    def started(self, seconds: float) -> None:
        """Note how long a worker took from its start until it served."""
        first = self.startup_seconds == FIRST_STARTUP_SECONDS
        self.startup_seconds += (1.0 if first else _WEIGHT) * (seconds - self.startup_seconds)


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
