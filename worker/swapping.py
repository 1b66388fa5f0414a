"""When a worker of several models leaves the one that is loaded, and for which: without clock or Redis.

A model without work is left at once. One that has work keeps its turn, so that loading takes no more than a
share of the time: exhaustive service with a limit, as in cyclic polling with switch-over times (Takagi 1988).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jobs.ledger_fleet import Waiting


@dataclass(frozen=True)
class Other:
    """A model that is not loaded and may be: what waits of it, and when it was left last."""

    name: str
    waiting: Waiting
    left_at: float = float("-inf")


@dataclass(frozen=True)
class Turn:
    """That of the loaded model.

    waiting         what waits of it
    busy            whether requests of it run here
    idle_seconds    for how long none have, and none could be claimed
    swap_seconds    what it cost to load it
    turn_seconds    the length of a turn
    owed_seconds    how long it has to be worked still, for loading to take no more than its share
    """

    waiting: Waiting
    busy: bool
    idle_seconds: float
    swap_seconds: float
    turn_seconds: float
    owed_seconds: float

    @property
    def has_work(self) -> bool:
        """Whether requests run or can be claimed, or some are about to be fed: for these it waits as long as
        a swap takes.
        """
        if self.busy or self.waiting.requests:
            return True
        return self.waiting.unfed > 0 and self.idle_seconds < self.swap_seconds


def turn_seconds(swap_seconds: Iterable[float], share: float) -> float:
    """Return how long a turn is when swaps take so long: `share` of turn and swap is the swap.

    The longest swap decides for all: models that load quickly are not to get less of the time.
    """
    return max(swap_seconds, default=0.0) * (1 - share) / share


def owed(left_seconds: float, turn: float, models: int) -> float:
    """Return what is owed after a swap, when so much was before.

    A model that was swapped in for a moment is paid for by those after it, up to a turn for each model.
    """
    return min(left_seconds + turn, models * turn)


def choose(turn: Turn, others: Sequence[Other]) -> str | None:
    """Return the model to swap to; None: stay.

    Of those that have something waiting it is the one that was left longest ago, so none starves. While the
    loaded one has work, nothing may be owed and the other's oldest request must have waited for a turn.
    """
    ready = [other for other in others if other.waiting.requests]
    if turn.has_work:
        least = turn.turn_seconds if turn.owed_seconds <= 0 else float("inf")
        ready = [other for other in ready if other.waiting.oldest_seconds >= least]
    return first(ready)


def first(others: Sequence[Other]) -> str | None:
    """Return whom to load: one that has something waiting, and of those who was left longest ago."""
    return min(others, key=_place).name if others else None


def _place(other: Other) -> tuple[bool, float, float]:
    return not other.waiting.requests, other.left_at, -other.waiting.oldest_seconds
