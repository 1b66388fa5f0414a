"""Who waits for company, for how long, and when nobody does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine import hashing
from tests.unit.engine.conftest import request
from worker.engine import EngineConfig, Request, loader, queue_delay
from worker.engine.fast import FastEngine

DELAY = 10.0


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_held(tiny_loaded: loader.Loaded, clock: Clock) -> Callable[..., FastEngine]:
    """Open engines that hold requests back."""
    loaded = replace(tiny_loaded, vocabulary=hashing.VOCABULARY, eos_ids=frozenset())

    def open_engine(**fields: Any) -> FastEngine:
        config = EngineConfig(**{"max_queue_delay_seconds": DELAY, "max_running": 8, **fields})
        return FastEngine(loaded, config, hashing.HashRunner(), clock)

    return open_engine


def some(first: int, count: int) -> list[Request]:
    return [request(str(i), [i, 1, 2], max_tokens=5) for i in range(first, first + count)]


@given(st.integers(0, 100), st.integers(0, 64), st.booleans(), st.lists(st.integers(1, 80), max_size=4))
def test_what_starts_makes_a_preferred_batch_or_was_due(
    waiting: int, running: int, due: bool, sizes: list[int]
) -> None:
    config = EngineConfig(max_running=64, max_queue_delay_seconds=1, preferred_batch_sizes=tuple(sizes))
    started = queue_delay.startable(waiting, running, due, config)
    assert 0 <= started <= waiting
    assert running + started <= 64
    if due:
        assert started == min(waiting, 64 - running)
    elif started:
        assert running + started in {*sizes, 64}


def test_a_request_is_held_back_until_the_oldest_has_waited_long_enough(
    open_held: Callable[..., FastEngine], clock: Clock
) -> None:
    engine = open_held()
    engine.add(some(0, 2))
    assert engine.step() == []
    clock.now += DELAY - 1
    engine.add(some(2, 1))
    engine.step()
    assert not engine.running
    clock.now += 1
    engine.step()
    assert engine.running == {"0", "1", "2"}


def test_a_preferred_size_starts_at_once_and_the_rest_when_it_is_due(
    open_held: Callable[..., FastEngine], clock: Clock
) -> None:
    engine = open_held(preferred_batch_sizes=(4, 2))
    engine.add(some(0, 5))
    engine.step()
    assert len(engine.running) == 4
    engine.step()
    assert len(engine.waiting) == 1
    clock.now += DELAY
    engine.step()
    assert len(engine.running) == 5


def test_a_full_batch_starts_at_once(open_held: Callable[..., FastEngine]) -> None:
    engine = open_held()
    engine.add(some(0, 9))
    engine.step()
    assert len(engine.running) == 8


def test_a_held_request_can_be_cancelled_and_the_others_still_run(
    open_held: Callable[..., FastEngine], clock: Clock
) -> None:
    engine = open_held()
    engine.add(some(0, 2))
    engine.step()
    engine.cancel(["0"])
    [cancelled] = engine.step()
    assert (cancelled.id, cancelled.finish_reason) == ("0", "cancelled")
    clock.now += DELAY
    done = [completion for _ in range(9) for completion in engine.step()]
    assert [completion.id for completion in done] == ["1"]
    assert not engine.has_work


def test_nobody_starves_while_others_keep_coming(open_held: Callable[..., FastEngine], clock: Clock) -> None:
    engine = open_held(preferred_batch_sizes=(3,))
    started: dict[str, float] = {}
    arrived: dict[str, float] = {}
    for turn in range(60):
        if turn % 3 == 0 and turn < 40:
            engine.add(some(turn, 1))
            arrived[str(turn)] = clock.now
        engine.step()
        for id in engine.running:
            started.setdefault(id, clock.now)
        clock.now += 1
    assert arrived.keys() == started.keys()
    assert max(started[id] - arrived[id] for id in arrived) <= DELAY
    assert not engine.has_work


def test_at_the_end_of_its_input_generate_holds_nobody_back(open_held: Callable[..., FastEngine]) -> None:
    engine = open_held()  # whose clock stands still: a request that is held back would wait forever
    assert len(list(engine.generate(some(0, 11)))) == 11
    assert engine.expects_more


def test_a_step_that_holds_all_back_rests_instead_of_spinning(tiny_loaded: loader.Loaded) -> None:
    config = EngineConfig(max_queue_delay_seconds=0.2)
    engine = FastEngine(replace(tiny_loaded, vocabulary=hashing.VOCABULARY), config, hashing.HashRunner())
    engine.add(some(0, 1))
    steps = 0
    while not engine.running:
        engine.step()
        steps += 1
    assert steps < 30
    assert engine.stats.step_seconds < 0.2, "a rest is no part of a step"
