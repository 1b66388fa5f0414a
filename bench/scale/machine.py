"""The fleet that is simulated: what a worker does in a second, how jobs share it, and what it costs.

A fluid by ticks. Requests are not followed one by one: a job is an amount of work, drained at the fleet's
rate.

Modelled
  Workers start in `startup_seconds`, up to a fifth more or less, and cost from the start on. One that retires
  takes nothing new and costs until the requests it has are done.
  A worker's rate grows with its batch b as peak * b (1 + h) / (b + h C): C requests at once reach the peak,
  one alone a small part of it. What is open spreads evenly over those that serve.
  Jobs share the fleet as tenants' fair turns do: each gets its fair share of the running requests, none more
  than it has; what is left over goes to the others (max-min).
  A job whose queue is empty still has its longest request to finish, which takes the time that its output
  takes, and holds one worker meanwhile.
  Redis shows 4,096 requests of a job at most (LONGHAUL_FEED_WINDOW_REQUESTS): this is what KEDA sees. Ours
  also reads what is not fed yet. Both see it as it is at their last look.
  The rate that ours learns is that of the last minutes, as jobs.scaling.Pace measures it.

Not modelled: planning time, crashes, preemption, several models, prefixes that are shared, and that a worker
which Kubernetes stops gives back what it does not finish in time (which would cost KEDA's rules more).
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bench.scale.patterns import Array, Jobs

FEED_WINDOW = 4096


@dataclass(frozen=True)
class Machine:
    """What a worker is. `decode_seconds` is the time of one output token of one request."""

    peak: float = 5_000.0
    capacity: int = 64
    half: float = 0.25
    startup_seconds: float = 120.0
    decode_seconds: float = 0.03

    def rate(self, batch: float) -> float:
        """Return the tokens a second of a worker with so many requests."""
        batch = min(batch, self.capacity)
        return self.peak * batch * (1 + self.half) / (batch + self.half * self.capacity)


@dataclass(frozen=True)
class View:
    """What a scaler sees at a time: see jobs.scaling. `shown` is the depth that Redis shows."""

    now: float
    queued: int
    leased: int
    shown: int
    tokens: float
    finished_tokens: float
    due: tuple[tuple[float, float], ...]
    serving: int
    starting: int


class Scaler(Protocol):
    """Decides how many workers there should be; asked every `every` seconds."""

    every: float

    def decide(self, view: View) -> int: ...


@dataclass
class Result:
    """What a run cost. Series have a value for each of `times`; in the pauses between there was nothing."""

    worker_hours: float
    makespan: float
    finished: Array
    deadline_misses: int
    starts: int
    times: list[float] = field(repr=False)
    workers: list[int] = field(repr=False)
    depth: list[int] = field(repr=False)


class Fleet:
    """Workers: a count that serves, those that start, and those that retire, by when they are through."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine, self.serving, self.starts = machine, 0, 0
        self._rng = np.random.default_rng(seed)
        self._starting: deque[tuple[float, int]] = deque()
        self._retiring: list[tuple[float, int]] = []

    @property
    def starting(self) -> int:
        return sum(count for _, count in self._starting)

    @property
    def cost(self) -> int:
        return self.serving + self.starting + sum(count for _, count in self._retiring)

    def turn(self, now: float) -> None:
        while self._starting and self._starting[0][0] <= now:
            self.serving += self._starting.popleft()[1]
        self._retiring = [each for each in self._retiring if each[0] > now]

    def scale(self, count: int, now: float, batch: float, request_seconds: float) -> None:
        """Start as many as are missing, or let as many go as are too many, those that start last."""
        change = count - self.serving - self.starting
        if change > 0:
            ready = now + self.machine.startup_seconds * self._rng.uniform(0.8, 1.2)
            if self._starting:
                ready = max(ready, self._starting[-1][0])
            self._starting.append((ready, change))
            self.starts += change
        elif change < 0:
            gone = min(-change, self.serving)
            self.serving -= gone
            busy = round(gone * min(1.0, batch))
            if busy:
                self._retiring.append((now + request_seconds / 2, busy))
            self._drop_starting(-change - gone)

    def _drop_starting(self, count: int) -> None:
        while count > 0 and self._starting:
            ready, some = self._starting.pop()
            if some > count:
                self._starting.append((ready, some - count))
            count -= some


def simulate(jobs: Jobs, scaler: Scaler, machine: Machine, tick: float = 5.0, seed: int = 0) -> Result:
    """Run jobs through a fleet that the scaler sizes, until all is done and it has let go of what it started
    (at most an hour later)."""
    fleet = Fleet(machine, seed)
    left = jobs.work.copy()
    finished = np.full(len(left), np.inf)
    tail = jobs.longest * machine.decode_seconds
    ends_after = np.full(len(left), np.inf)
    now = float(jobs.arrival[0])
    next_look, done_tokens, hours = now, 0.0, 0.0
    times: list[float] = []
    workers: list[int] = []
    depths: list[int] = []
    first, last_job = 0, 0
    end_of_all = np.inf
    while now < end_of_all:
        last_job = int(np.searchsorted(jobs.arrival, now, side="right"))
        while first < last_job and finished[first] < np.inf:
            first += 1
        slots = np.arange(first, last_job)
        active = slots[np.isinf(finished[first:last_job])]
        fleet.turn(now)
        open_requests = np.maximum(1.0, np.ceil(left[active] / jobs.tokens[active]))
        draining = left[active] <= 0
        total = int(open_requests.sum()) if len(active) else 0
        running = min(total, fleet.serving * machine.capacity)
        batch = running / fleet.serving if fleet.serving else 0.0
        if now >= next_look:
            view = _view(now, jobs, active, left, open_requests, running, total, done_tokens, fleet)
            seconds = float(np.mean(tail[active])) / 4 if len(active) else 0.0
            fleet.scale(scaler.decide(view), now, batch, seconds)
            next_look = now + scaler.every
        times.append(now)
        workers.append(fleet.cost)
        depths.append(total)
        hours += fleet.cost * tick / 3600
        if len(active):
            speed = fleet.serving * machine.rate(batch) * tick
            done_tokens += _drain(left, active[~draining], open_requests[~draining], speed, fleet, machine)
            newly = active[(left[active] <= 0) & np.isinf(ends_after[active])]
            # The longest of its requests began when the last ones were claimed, or before.
            ends_after[newly] = now + tick + tail[newly]
            over = active[ends_after[active] <= now + tick]
            finished[over] = now + tick
        elif last_job == len(left):
            end_of_all = min(end_of_all, now + 3600.0)
            if not fleet.cost:
                break
        else:
            now = _skip(now, float(jobs.arrival[last_job]), tick, fleet, next_look)
        now += tick
    misses = int((finished > jobs.deadline).sum())
    made = float(finished.max() - jobs.arrival[0])
    return Result(hours, made, finished, misses, fleet.starts, times, workers, depths)


def _drain(
    left: Array, jobs: NDArray[np.int64], requests: Array, speed: float, fleet: Fleet, machine: Machine
) -> float:
    """Take `speed` tokens of work from jobs by fair turns; return how many were there."""
    if not len(jobs) or speed <= 0:
        return 0.0
    room = float(fleet.serving * machine.capacity)
    shares = _max_min(requests, room)
    per_request = speed / shares.sum()
    taken = np.minimum(left[jobs], shares * per_request)
    left[jobs] -= taken
    left[jobs[left[jobs] < 1.0]] = 0.0
    return float(taken.sum())


def _max_min(wanted: Array, room: float) -> Array:
    """Return what each gets of `room`: all it wants, or the same as the others who want more."""
    if wanted.sum() <= room:
        return wanted
    order = np.sort(wanted)
    before = np.concatenate([[0.0], np.cumsum(order)[:-1]])
    level = (room - before) / np.arange(len(order), 0, -1)
    place = int(np.argmax(order >= level))
    return np.minimum(wanted, level[place])


def _view(
    now: float,
    jobs: Jobs,
    active: NDArray[np.int64],
    left: Array,
    requests: Array,
    running: int,
    total: int,
    done: float,
    fleet: Fleet,
) -> View:
    order = np.argsort(jobs.deadline[active], kind="stable")[:64]
    due = tuple(
        (float(jobs.deadline[job] - now), float(left[job]))
        for job in active[order]
        if jobs.deadline[job] > now
    )
    shown = int(np.minimum(requests, FEED_WINDOW).sum()) if len(active) else 0
    tokens = float(left[active].sum())
    return View(now, total - running, running, shown, tokens, done, due, fleet.serving, fleet.starting)


def _skip(now: float, until: float, tick: float, fleet: Fleet, next_look: float) -> float:
    """Return a later time when nothing can happen before it: no work, no workers."""
    if fleet.cost or until - now < 2 * tick:
        return now
    return now + (int((until - now) / tick) - 1) * tick
