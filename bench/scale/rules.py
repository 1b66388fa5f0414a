"""The rules that are compared: ours, KEDA's with the HPA's arithmetic, and a fleet that never changes."""

import math
from collections import deque

from bench.scale.machine import Machine, View
from jobs import scaling


class Ours:
    """jobs.scaling, driven as jobs.autoscale drives it."""

    every = 5.0

    def __init__(self, policy: scaling.Policy, machine: Machine) -> None:
        self._policy, self._machine = policy, machine
        self._pace = scaling.Pace()
        self._last: View | None = None
        self._spare = 0.0

    def decide(self, view: View) -> int:
        last = self._last or view
        passed = view.now - last.now
        busy = min(view.serving, view.leased)
        self._pace.add(passed, view.finished_tokens - last.finished_tokens, busy, view.queued)
        depth = scaling.Depth(view.queued, view.leased, 0, view.due)
        workers = scaling.Workers(
            view.serving,
            view.starting,
            self._machine.capacity,
            self._machine.startup_seconds,
            self._spare,
            self._pace.stalled_seconds,
        )
        decision = scaling.desired(depth, view.tokens, self._pace.rate, workers, self._policy)
        self._spare = scaling.spare(decision, workers.count, self._spare, passed)
        self._last = view
        return decision.count


class Keda:
    """A ScaledObject with one redis trigger on the requests that Redis shows, and the HPA behind it.

    Facts of KEDA 2.x and Kubernetes' autoscaling/v2: the metric is an AverageValue, so the HPA wants
    ceil(depth / target); it looks every 15 s and does nothing within a tolerance of 10 %; up, by the larger
    of 4 pods and 100 % each 15 s; down, to the largest that it wanted in the last 300 s, by at most `down`
    pods a minute (None: all at once). KEDA polls every 30 s when there are none, and goes from one to none
    300 s after the depth was last above the activation (0).
    """

    every = 15.0
    POLL_SECONDS, COOLDOWN_SECONDS, STABLE_SECONDS, TOLERANCE = 30.0, 300.0, 300.0, 0.1

    def __init__(self, target: float, most: int = 100, down: int | None = None) -> None:
        self._target, self._most, self._down = target, most, down
        self._polled = self._active = -math.inf
        self._wanted: deque[tuple[float, int]] = deque()
        self._downs: deque[tuple[float, int]] = deque()

    def decide(self, view: View) -> int:
        have = view.serving + view.starting
        if view.shown > 0:
            self._active = view.now
        if not have:
            if view.now - self._polled < self.POLL_SECONDS:
                return 0
            self._polled = view.now
            return 1 if view.shown > 0 else 0
        if have == 1 and view.shown == 0 and view.now - self._active >= self.COOLDOWN_SECONDS:
            self._wanted.clear()
            return 0
        return self._hpa(view, have)

    def _hpa(self, view: View, have: int) -> int:
        ratio = view.shown / (self._target * have)
        wanted = have if abs(ratio - 1) <= self.TOLERANCE else math.ceil(view.shown / self._target)
        wanted = max(1, min(self._most, wanted))
        self._wanted.append((view.now, wanted))
        while self._wanted[0][0] < view.now - self.STABLE_SECONDS:
            self._wanted.popleft()
        if wanted > have:
            return min(wanted, have + max(4, have))
        return self._fewer(view.now, have, max(count for _, count in self._wanted))

    def _fewer(self, now: float, have: int, wanted: int) -> int:
        if wanted >= have or self._down is None:
            return min(have, wanted)
        while self._downs and self._downs[0][0] < now - 60:
            self._downs.popleft()
        room = self._down - sum(count for _, count in self._downs)
        gone = min(have - wanted, max(0, room))
        if gone:
            self._downs.append((now, gone))
        return have - gone


class Fixed:
    """Always so many, until all is done."""

    every = 3600.0

    def __init__(self, count: int) -> None:
        self._count = count

    def decide(self, view: View) -> int:
        return self._count
