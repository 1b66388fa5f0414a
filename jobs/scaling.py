"""How many workers a model should have: a pure function of what is left, how fast it goes, and who is there.

`docs/scaling.md` says the same for users. The shell around it is `jobs.autoscale`; `bench/scale_sim.py` runs
it over arrival patterns.
"""

import bisect
import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Depth:
    """What is left of one model.

    queued    requests that no worker holds, in Redis or not yet
    leased    requests that workers hold
    units     open units of jobs: they need some worker, of any model
    due       (seconds left, tokens left) of jobs with a deadline, the earliest first
    """

    queued: int = 0
    leased: int = 0
    units: int = 0
    due: tuple[tuple[float, float], ...] = ()

    @property
    def open(self) -> int:
        return self.queued + self.leased


@dataclass(frozen=True)
class Workers:
    """Who works for one model.

    serving, starting    how many take requests; how many are being started
    capacity             requests that one runs at once
    startup_seconds      from the start of a process until it serves
    spare_seconds        for how long fewer would have done (`Decision.fewest` < count)
    stalled_seconds      for how long those that serve have held requests and finished none
    """

    serving: int = 0
    starting: int = 0
    capacity: int = 64
    startup_seconds: float = 60.0
    spare_seconds: float = 0.0
    stalled_seconds: float = 0.0

    @property
    def count(self) -> int:
        return self.serving + self.starting


@dataclass(frozen=True)
class Policy:
    """What decides. The defaults from `target_seconds` to `fill` are chosen with bench/scale_sim.py.

    least, most       bounds of the count
    target_seconds    the time in which what is left should be done
    spare_seconds     for how long fewer must do before some stop; the last one stays as long as
                      `idle_seconds`, and both at least as long as `startup_patience` start-ups
    startup_share     the most that a start-up may take of the time that what is left keeps a worker busy
    fill              how full batches of fewer workers may be for them to do
    stall_seconds     nothing finished for so long: more workers do not help
    """

    least: int = 0
    most: int = 1
    target_seconds: float = 900.0
    spare_seconds: float = 60.0
    idle_seconds: float = 60.0
    startup_patience: float = 0.5
    startup_share: float = 0.2
    fill: float = 0.75
    stall_seconds: float = 900.0


@dataclass(frozen=True)
class Decision:
    """How many workers there should be, the fewest that would do, and why."""

    count: int
    fewest: int
    reason: str


FIRST_FILLS = 4
"""While the rate is not known: how many batches each worker should find."""
FIRST_MOST = 8
"""While the rate is not known: no more workers; some requests later it is known."""
DEADLINE_SHARE = 0.7
"""The part of the time until a deadline that is planned with."""


def desired(depth: Depth, tokens: float, rate: float | None, workers: Workers, settings: Policy) -> Decision:
    """Decide how many workers one model should have now.

    `tokens` is all that is left to compute for it, expected outputs included; `rate` is tokens a second of
    one busy worker, None while it is not known.

    1. Up: as many as do what is left in `target_seconds`, or what is due by each deadline; no more than find
       a batch in the queue (what is leased cannot be shared), nor than repay their start-up. Those that start
       count. While nothing finishes, none are added.
    2. Down: never while more waits than there are workers. When fewer, with batches `fill` full, would have
       done for `spare_seconds`, as many as do. The last one goes after `idle_seconds` without any work.
    3. At least one while anything is left, a unit of a job included; always between `least` and `most`.

    A worker that hangs holds its requests: they are leased, so nobody is added for them, and as long as it
    holds them it stays.
    """
    fewest = _clamp(max(_fewest(depth, workers, settings), _by_deadline(depth, rate, workers)), settings)
    wanted, why = _wanted(depth, tokens, rate, workers, settings)
    wanted = _clamp(wanted, settings)
    have = workers.count
    if have > settings.most:
        return Decision(settings.most, fewest, f"no more than {settings.most}")
    if wanted > have:
        return Decision(wanted, fewest, why)
    if fewest < have and _patient(depth, fewest, workers, settings):
        return Decision(fewest, fewest, _why_fewer(depth, fewest))
    return Decision(have, fewest, "enough")


def _ceil(workers: float) -> int:
    """Round up; a rate next to nothing asks for more than can be counted."""
    return math.ceil(min(workers, 1e9))


def _clamp(count: int, settings: Policy) -> int:
    return max(settings.least, min(settings.most, count))


def _fewest(depth: Depth, workers: Workers, settings: Policy) -> int:
    """Return how many hold all that is left in batches that are full enough; all, while many wait."""
    if not depth.open:
        return 1 if depth.units else 0
    if depth.queued > max(1, workers.serving):
        return max(1, workers.count)
    return math.ceil(depth.open / (workers.capacity * settings.fill))


def _by_deadline(depth: Depth, rate: float | None, workers: Workers) -> int:
    """Return how many finish each job by its deadline, when all take turns.

    With equal turns a job is through when those that are smaller are, and of the others as much as of itself.
    """
    if not rate or not depth.open:
        return 0
    sizes = sorted(tokens for _, tokens in depth.due)
    sums = list(itertools.accumulate(sizes, initial=0.0))
    most = 0
    for seconds, tokens in depth.due:
        smaller = bisect.bisect_left(sizes, tokens)
        due = sums[smaller] + tokens * (len(sizes) - smaller)
        left = seconds * DEADLINE_SHARE
        if due > rate * left * workers.serving:  # others must be started first
            left -= workers.startup_seconds
        most = max(most, _ceil(due / (rate * max(left, 1.0))))
    return min(most, _useful(depth, workers))


def _useful(depth: Depth, workers: Workers) -> int:
    """Return how many can have requests at all: those that have some now, and those that find a batch."""
    batches = math.ceil(depth.queued / workers.capacity)
    busy = min(workers.serving, depth.leased)
    return max(1, busy + batches)


def _wanted(
    depth: Depth, tokens: float, rate: float | None, workers: Workers, settings: Policy
) -> tuple[int, str]:
    if not depth.open:
        return (1, open_units(depth.units)) if depth.units else (0, "nothing is left")
    if workers.serving and workers.stalled_seconds >= settings.stall_seconds:
        return 1, f"nothing finished for {workers.stalled_seconds:.0f} s"
    what = _left(depth.open)
    if not rate:
        fills = math.ceil(depth.queued / (workers.capacity * FIRST_FILLS))
        first = max(1, min(fills, FIRST_MOST, _useful(depth, workers)))
        return first, f"{what}, at a rate not known yet"
    horizon = max(settings.target_seconds, workers.startup_seconds / settings.startup_share)
    by_time = min(_ceil(tokens / (rate * horizon)), _useful(depth, workers))
    by_deadline = _by_deadline(depth, rate, workers)
    what += f", {tokens:,.0f} tokens at {rate:,.0f} a second and worker"
    if by_deadline > by_time:
        return by_deadline, f"{what}, due in {depth.due[0][0]:.0f} s"
    return max(1, by_time), f"{what}, to be done in {horizon:.0f} s"


def _patient(depth: Depth, fewest: int, workers: Workers, settings: Policy) -> bool:
    asked = settings.spare_seconds if fewest or depth.open or depth.units else settings.idle_seconds
    patience = max(asked, settings.startup_patience * workers.startup_seconds)
    return workers.spare_seconds >= patience


def _why_fewer(depth: Depth, fewest: int) -> str:
    if not depth.open and not depth.units:
        return "nothing is left"
    return f"{_left(depth.open)}, {fewest} can run them"


def spare(decision: Decision, count: int, spare_seconds: float, passed: float) -> float:
    """Return for how long fewer than `count` workers have done, `passed` seconds later."""
    return spare_seconds + passed if decision.fewest < count else 0.0


def share(
    wanted: dict[str, int], waiting: dict[str, float], held: dict[str, int], slots: int
) -> dict[str, int]:
    """Divide slots among models.

    `wanted` workers by model; `waiting`: for how many seconds a model's oldest work has waited with nobody
    to do it; `held`: slots it has. Each model that wants some gets one, who waited longest first, then who
    has one already. Then those that run go on. The rest go one by one to the model with the most wanted for
    each it has.
    """
    order = sorted(wanted, key=lambda name: (-waiting.get(name, 0.0), -held.get(name, 0), name))
    given = dict.fromkeys(wanted, 0)
    for name in order:
        if wanted[name] and sum(given.values()) < slots:
            given[name] = 1
    for name in order:
        more = min(wanted[name], held.get(name, 0)) - given[name]
        if given[name] and more > 0:
            given[name] += min(more, slots - sum(given.values()))
    while sum(given.values()) < slots:
        short = [name for name in order if 0 < given[name] < wanted[name]]
        if not short:
            break
        given[max(short, key=lambda name: (wanted[name] / (given[name] + 1), held.get(name, 0)))] += 1
    return given


class Pace:
    """The rate of a busy worker, learned from what finishes while requests wait, so that batches are full.

    A sample takes `least_seconds`, of which the first results may need some, and something finished. It moves
    the estimate by `weight`, and lowers it to half at most: a worker that hangs does not make the others look
    slow for long.
    """

    def __init__(self, rate: float | None = None, least_seconds: float = 60.0, weight: float = 0.3) -> None:
        self.rate = rate
        self.stalled_seconds = 0.0
        self._least, self._weight = least_seconds, weight
        self._busy = 0
        self._forget()

    def add(self, passed: float, tokens: float, busy: int, queued: int) -> None:
        """Note `tokens` finished in `passed` seconds, at the end of which `busy` workers hold requests."""
        self.stalled_seconds = 0.0 if tokens > 0 or not busy else self.stalled_seconds + passed
        all_the_time, self._busy = min(busy, self._busy), busy
        if not all_the_time or not queued:
            self._forget()
            return
        self._passed += passed
        self._worked += passed * all_the_time
        self._tokens += tokens
        if self._passed >= self._least and self._tokens > 0:
            self._learn(self._tokens / self._worked)
            self._forget()

    def _forget(self) -> None:
        self._passed = self._worked = self._tokens = 0.0

    def _learn(self, sample: float) -> None:
        if self.rate is None:
            self.rate = sample
        else:
            self.rate += self._weight * (max(sample, self.rate / 2) - self.rate)


def _left(count: int) -> str:
    return "1 request is left" if count == 1 else f"{count:,} requests are left"


def open_units(count: int) -> str:
    """Say that so many units are open."""
    return "1 unit of a job is open" if count == 1 else f"{count} units of jobs are open"
