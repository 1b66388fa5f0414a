"""The scaling policy: what it starts for, what it stops for, and what must not move it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import scaling
from jobs.scaling import Depth, Policy, Workers

RATE = 1000.0
POLICY = Policy(most=16, target_seconds=600, spare_seconds=60, idle_seconds=120, startup_patience=1, fill=0.5)
WORKERS = Workers(capacity=64, startup_seconds=60)


def count(depth: Depth, tokens: float, workers: Workers, rate: float | None = RATE) -> int:
    return scaling.desired(depth, tokens, rate, workers, POLICY).count


class World:
    """A loop around the policy as the autoscaler is one: workers start late, and what is spare is timed."""

    def __init__(self, policy: Policy = POLICY, startup_seconds: float = 60, step: float = 5) -> None:
        self.policy, self.startup, self.step = policy, startup_seconds, step
        self.now = self.spare = 0.0
        self.serving = 0
        self.starting: list[float] = []
        self.counts: list[int] = []
        self.starts = self.stops = 0

    def run(self, seconds: float, load: Callable[["World"], tuple[Depth, float]]) -> "World":
        for _ in range(int(seconds / self.step)):
            self.now += self.step
            self.serving += sum(ready <= self.now for ready in self.starting)
            self.starting = [ready for ready in self.starting if ready > self.now]
            depth, tokens = load(self)
            workers = Workers(self.serving, len(self.starting), 64, self.startup, self.spare)
            decision = scaling.desired(depth, tokens, RATE, workers, self.policy)
            self.spare = scaling.spare(decision, workers.count, self.spare, self.step)
            self._apply(decision.count - workers.count)
            self.counts.append(self.serving + len(self.starting))
        return self

    def _apply(self, change: int) -> None:
        if change > 0:
            self.starting += [self.now + self.startup] * change
            self.starts += change
        else:
            self.stops -= change
            fewer = min(-change, self.serving)
            self.serving -= fewer
            del self.starting[: -change - fewer]


def test_no_work_needs_no_worker_and_any_work_needs_one() -> None:
    assert count(Depth(), 0, WORKERS) == 0
    assert count(Depth(units=1), 0, WORKERS) == 1, "a job that is being planned"
    assert count(Depth(queued=1), 10, WORKERS) == 1


def test_as_many_as_do_what_is_left_in_the_target_time() -> None:
    assert count(Depth(queued=10_000), 600 * RATE * 5, WORKERS) == 5
    assert count(Depth(queued=10_000), 600 * RATE * 500, WORKERS) == POLICY.most


def test_who_starts_counts_so_none_are_added_while_enough_start() -> None:
    depth, tokens = Depth(queued=10_000), 600 * RATE * 5
    assert count(depth, tokens, replace(WORKERS, starting=5)) == 5
    assert count(depth, tokens, replace(WORKERS, serving=2, starting=3)) == 5


def test_a_long_start_up_must_be_worth_it() -> None:
    depth, tokens = Depth(queued=10_000), 600 * RATE * 5
    slow = replace(WORKERS, startup_seconds=600)
    assert count(depth, tokens, slow) == 1, "each would have worked for ten minutes, after as many to start"


def test_nobody_is_added_for_what_others_hold() -> None:
    # One long group: a worker holds all there is, and nothing is left for a second one to take.
    held = Depth(queued=0, leased=64)
    assert count(held, 3600 * RATE * 10, replace(WORKERS, serving=1)) == 1
    assert count(replace(held, queued=5), 3600 * RATE * 10, replace(WORKERS, serving=1)) == 2


def test_a_worker_that_hangs_does_not_make_it_scale_for_ever() -> None:
    hung = Depth(queued=0, leased=64)
    world = World().run(7200, lambda one: (hung, 1e12))
    assert max(world.counts) == 1

    def behind(one: World) -> tuple[Depth, float]:
        return Depth(queued=1000 if one.now < 300 else 0, leased=64), 600 * RATE * 3

    world = World().run(7200, behind)
    assert max(world.counts) == 3
    assert world.starts == 3
    assert world.counts[-1] == 2, "what hangs counts as its requests do: two half batches"


def test_while_nothing_finishes_none_are_added() -> None:
    stalled = replace(WORKERS, serving=2, stalled_seconds=POLICY.stall_seconds)
    assert count(Depth(queued=10_000, leased=128), 1e9, stalled) == 2


def test_a_deadline_asks_for_more() -> None:
    tokens = 600 * RATE * 2
    assert count(Depth(queued=10_000), tokens, WORKERS) == 2
    due = Depth(queued=10_000, due=((250.0, tokens),))
    assert count(due, tokens, WORKERS) == 11, "1200 s of work in 70 % of 250 s, less a start-up"


def test_a_job_that_is_due_takes_turns_with_those_that_are_not() -> None:
    due, later = 100 * RATE, 86_400.0
    assert count(Depth(queued=10_000, due=((1000.0, due),)), 0, WORKERS) == 1
    small = [(later, due / 100)] * 7
    assert count(Depth(queued=10_000, due=((200.0, due), *small)), 0, WORKERS) == 2
    large = [(later, due * 10)] * 7
    found = count(Depth(queued=10_000, due=((200.0, due), *large)), 0, WORKERS)
    assert found == 10, "of each of the others as much as of itself: 800 s in 70 % of 200 s, less a start-up"


def test_without_a_rate_a_few_begin_and_measure_it() -> None:
    assert count(Depth(queued=100), 0, WORKERS, rate=None) == 1
    assert count(Depth(queued=1000), 0, WORKERS, rate=None) == 4
    assert count(Depth(queued=10**7), 0, WORKERS, rate=None) == scaling.FIRST_MOST


def test_fewer_only_after_fewer_would_have_done_for_a_while() -> None:
    depth, many = Depth(leased=20), replace(WORKERS, serving=4)
    assert count(depth, 100, many) == 4
    assert count(depth, 100, replace(many, spare_seconds=59)) == 4
    assert count(depth, 100, replace(many, spare_seconds=60)) == 1


def test_none_stop_while_more_waits_than_there_are_workers() -> None:
    many = replace(WORKERS, serving=8, spare_seconds=1e6)
    assert count(Depth(queued=9, leased=30), 100, many) == 8
    assert count(Depth(queued=8, leased=30), 100, many) == 2


def test_the_last_one_waits_longer_and_at_least_as_long_as_a_start_up() -> None:
    last = replace(WORKERS, serving=1)
    assert count(Depth(), 0, replace(last, spare_seconds=119)) == 1
    assert count(Depth(), 0, replace(last, spare_seconds=120)) == 0
    slow = replace(last, startup_seconds=300)
    assert count(Depth(), 0, replace(slow, spare_seconds=299)) == 1
    assert count(Depth(), 0, replace(slow, spare_seconds=300)) == 0


def test_bounds_are_kept() -> None:
    policy = replace(POLICY, least=2, most=3)
    idle = Workers(3, spare_seconds=1e9)
    assert scaling.desired(Depth(), 0, RATE, idle, policy).count == 2
    assert scaling.desired(Depth(queued=10**6), 1e12, RATE, idle, policy).count == 3
    assert scaling.desired(Depth(queued=10**6), 1e12, RATE, Workers(5), policy).count == 3


def test_a_load_that_flaps_does_not_make_workers_flap() -> None:
    def flapping(one: World) -> tuple[Depth, float]:
        on = int(one.now / 30) % 2 == 0
        return (Depth(queued=300, leased=64), 600 * RATE * 3) if on else (Depth(leased=5), 5000)

    world = World().run(7200, flapping)
    assert world.starts <= 4
    assert world.stops == 0


def test_a_burst_starts_once_what_it_needs_and_ends_at_none() -> None:
    left = {"tokens": 0.0}

    def burst(one: World) -> tuple[Depth, float]:
        if one.now == 100:
            left["tokens"] = 600 * RATE * 6
        left["tokens"] = max(0.0, left["tokens"] - one.serving * RATE * one.step)
        requests = int(left["tokens"] / 1000)
        leased = min(requests, 64 * one.serving)
        return Depth(requests - leased, leased), left["tokens"]

    world = World().run(3600, burst)
    assert max(world.counts) == 6
    assert world.starts == 6
    assert world.counts[-1] == 0


@given(
    st.builds(
        Depth,
        st.integers(0, 10**7),
        st.integers(0, 10**5),
        st.integers(0, 50),
        st.lists(st.tuples(st.floats(-100, 1e5), st.floats(0, 1e9)), max_size=3).map(
            lambda due: tuple(sorted(due))
        ),
    ),
    st.floats(0, 1e300),
    st.none() | st.floats(0, 1e300),
    st.builds(
        Workers,
        st.integers(0, 50),
        st.integers(0, 50),
        st.integers(1, 512),
        st.floats(1, 1200),
        st.floats(0, 1e5),
        st.floats(0, 1e5),
    ),
    st.integers(0, 20),
    st.integers(0, 100),
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_seen_the_answer_is_within_bounds_and_keeps_what_is_needed(
    depth: Depth, tokens: float, rate: float | None, workers: Workers, least: int, more: int
) -> None:
    policy = replace(POLICY, least=least, most=least + more + 1)
    found = scaling.desired(depth, tokens, rate, workers, policy)
    assert least <= found.count <= policy.most
    assert found.reason
    if depth.open or depth.units:
        assert found.count >= 1
    if found.count < min(workers.count, policy.most):
        assert depth.queued <= max(1, workers.serving), "none stop while many wait"
        assert workers.spare_seconds >= policy.spare_seconds
    if found.count > max(workers.count, least, 1):
        assert depth.queued, "what is held already cannot be given to others"


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 900), st.integers(0, 4)), max_size=6),
    st.integers(0, 8),
)
@settings(max_examples=200, deadline=None)
def test_slots_are_divided_without_excess_and_without_starving(
    models: list[tuple[int, float, int]], slots: int
) -> None:
    wanted = {str(name): count for name, (count, _, _) in enumerate(models)}
    waiting = {str(name): seconds for name, (_, seconds, _) in enumerate(models)}
    held = {str(name): count for name, (_, _, count) in enumerate(models)}
    given = scaling.share(wanted, waiting, held, slots)
    assert sum(given.values()) == min(slots, sum(wanted.values()))
    assert all(0 <= given[name] <= wanted[name] for name in wanted)
    without = [name for name in wanted if wanted[name] and not given[name]]
    if without:
        assert max(given.values()) <= 1, "nobody has two while somebody has none"
        served = [waiting[name] for name in wanted if given[name]]
        assert not served or min(served) >= max(waiting[name] for name in without)


def test_slots_go_to_models_by_what_they_have_to_do() -> None:
    assert scaling.share({"a": 6, "b": 2}, {}, {}, 4) == {"a": 3, "b": 1}
    assert scaling.share({"a": 4, "b": 4}, {}, {"a": 3}, 4) == {"a": 3, "b": 1}, "those that run go on"


def test_the_rate_is_learned_only_with_full_batches() -> None:
    pace = scaling.Pace()
    for _ in range(30):
        pace.add(5, 50, 2, queued=0)
    assert pace.rate is None
    for _ in range(14):
        pace.add(5, 10_000, 2, queued=100)
    assert pace.rate == pytest.approx(1000)


def test_a_worker_that_joined_just_now_does_not_lower_the_rate() -> None:
    pace = scaling.Pace()
    for busy, tokens in [(1, 0), *[(1, 5000)] * 6, (8, 5000), *[(8, 40_000)] * 6]:
        pace.add(5, tokens, busy, queued=100)
    assert pace.rate == pytest.approx(1000)


def test_a_pause_lowers_the_rate_to_half_at_most_and_is_told() -> None:
    pace = scaling.Pace(rate=1000)
    for _ in range(100):
        pace.add(5, 0, 1, queued=100)
    assert (pace.rate, pace.stalled_seconds) == (1000, 500)
    pace.add(5, 10, 1, queued=100)
    assert pace.rate == pytest.approx(850), "three tenths of the way to half of it"
    assert pace.stalled_seconds == 0
