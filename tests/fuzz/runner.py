"""Give a target so many inputs; each must be dealt with, within a second, as promised."""

import faulthandler
import time
from dataclasses import dataclass

from tests.fuzz import seeds
from tests.fuzz.mutate import Mutator
from tests.fuzz.targets import Target

MOST_SECONDS = 1.0
_HUNG_SECONDS = 120


@dataclass(frozen=True)
class Done:
    """What came of a run. `slowest` in seconds of this thread's processor time."""

    inputs: int
    taken: int
    seconds: float
    slowest: float


class Fault(AssertionError):
    """An input that was not dealt with as promised."""


def run(target: Target, inputs: int, seed: int = 1) -> Done:
    """Fuzz a target; raises Fault with the input and its number."""
    mutator = Mutator(seed, seeds.NAMES + seeds.SCHEMA_NAMES if target.name == "grammars" else seeds.NAMES)
    taken, slowest, began = 0, 0.0, time.monotonic()
    for number in range(inputs):
        if number % 256 == 0:
            faulthandler.dump_traceback_later(_HUNG_SECONDS, exit=True)
        given = target.make(mutator)
        started = time.thread_time()
        try:
            taken += target.take(given)
        except Exception as error:
            shown = f"{target.name}, seed {seed}, input {number}: {given!r:.2000}"
            raise Fault(f"{type(error).__name__}: {error}\n{shown}") from error
        took = time.thread_time() - started
        if took > MOST_SECONDS:
            raise Fault(f"{took:.2f} s for {target.name}, seed {seed}, input {number}: {given!r:.2000}")
        slowest = max(slowest, took)
    faulthandler.cancel_dump_traceback_later()
    return Done(inputs, taken, time.monotonic() - began, slowest)
