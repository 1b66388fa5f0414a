"""The watchdog calls for an engine that gets nowhere, and for nothing else."""

import time
from collections.abc import Callable
from threading import Event

from worker.watchdog import Watchdog


class Clocks:
    """A wall clock and a processor clock that a test moves."""

    def __init__(self) -> None:
        self.wall = self.used = 0.0

    def dog(self, seconds: float) -> Watchdog:
        return Watchdog(seconds, lambda _: None, lambda: self.wall, lambda: self.used)

    def run(self, dog: Watchdog, seconds: float, every: float = 1.0, used: float = 0.0) -> bool:
        """Let so much time pass, with a look `every` so often; tell whether one of them was too late."""
        found = False
        for _ in range(round(seconds / every)):
            self.wall += every
            self.used += used * every
            found = dog.look() or found
        return found


def test_a_step_that_is_too_long_is_found() -> None:
    clocks = Clocks()
    dog = clocks.dog(60)
    with dog.watching():
        assert not clocks.run(dog, 59)
        assert clocks.run(dog, 2)


def test_many_honest_steps_are_not_one_long_one() -> None:
    clocks = Clocks()
    dog = clocks.dog(60)
    for _ in range(20):
        with dog.watching():
            assert not clocks.run(dog, 50)


def test_idling_between_steps_does_not_count() -> None:
    clocks = Clocks()
    dog = clocks.dog(60)
    with dog.watching():
        clocks.run(dog, 50)
    assert not clocks.run(dog, 500)


def test_short_steps_that_get_nowhere_are_found() -> None:
    clocks = Clocks()
    dog = clocks.dog(60)
    for _ in range(61):
        with dog.watching(("steps", 7)):
            found = clocks.run(dog, 1)
    assert found


def test_short_steps_that_get_on_are_not() -> None:
    clocks = Clocks()
    dog = clocks.dog(60)
    for step in range(200):
        with dog.watching(("steps", step // 50)):
            assert not clocks.run(dog, 1)


def test_a_process_that_was_stopped_lost_no_time() -> None:
    clocks = Clocks()
    dog = clocks.dog(60)
    with dog.watching():
        for _ in range(20):
            assert not clocks.run(dog, 10_000, every=10_000)


def test_a_library_that_keeps_the_lock_while_it_works_is_found() -> None:
    clocks = Clocks()
    dog = clocks.dog(60)
    with dog.watching():
        assert clocks.run(dog, 90, every=30, used=1.0)


def test_waiting_for_somebody_else_does_not_count() -> None:
    clocks = Clocks()
    dog = clocks.dog(60)
    with dog.watching():
        clocks.run(dog, 50)
        with dog.paused():
            assert not clocks.run(dog, 500)
        assert not clocks.run(dog, 50)
        assert clocks.run(dog, 20)


def _called(seconds: float, during: Callable[[Watchdog], None]) -> bool:
    called = Event()
    dog = Watchdog(seconds, lambda _: called.set())
    dog.start()
    during(dog)
    dog.close()
    return called.wait(0.3)


def test_its_thread_calls_for_real() -> None:
    def hang(dog: Watchdog) -> None:
        with dog.watching():
            time.sleep(0.6)

    assert _called(0.3, hang)
    assert not _called(5, hang)
    assert not _called(0, hang)
