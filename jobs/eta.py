"""How long a job still takes, from how its counts moved: one rule for `watch`, `run`, `generate` and `top`.

`api/page/eta.js` is the same rule for the page; `tests/unit/eta_cases.json` holds both to the same answers.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

_WINDOW_SECONDS = 60.0
_WINDOW_SHARE = 0.25
"""Of what has finished, at least so much is looked at, however long ago that was."""
_LEAST_SECONDS = 4.0
_LEAST_SHARE = 0.05
_LEAST, _ENOUGH = 4, 50
"""So many requests, or a share of the job between these, must have finished while somebody looked."""
_SHARE_AT_ONCE = 0.1
_MOST_LOOKS = 200


class Look(NamedTuple):
    """What was seen of a job at a time (seconds): how many of its requests succeeded, and how many failed."""

    at: float
    completed: int
    failed: int = 0


def seconds_left(looks: Sequence[Look], total: int) -> float | None:
    """Return how long the rest of `total` requests takes, or None while too little is known.

    Only moments at which more had succeeded than before count: results come in groups, the time before the
    first is the loading of a model as often as not, and requests that are refused take no time.
    """
    if not looks:
        return None
    now, completed, failed = looks[-1]
    moves = _recent(moves_of(looks), now)
    if len(moves) < 2:
        return None
    gained, took = moves[-1].completed - moves[0].completed, moves[-1].at - moves[0].at
    if took < _LEAST_SECONDS or gained < min(_ENOUGH, max(_LEAST, _LEAST_SHARE * (total - failed))):
        return None
    pause = max(after.at - before.at for before, after in itertools.pairwise(moves))
    quiet = now - moves[-1].at
    # A pause as long as those before is what they all look like; one that is longer slows the job down.
    rate = gained / (took + max(0.0, quiet - pause))
    return max(1.0, (total - completed - failed) / rate - min(quiet, pause))


def since_start(look: Look, total: int) -> float | None:
    """Return the same of a job of which one look is all there is; `look.at` counts from when it began."""
    if look.completed < max(_LEAST, _SHARE_AT_ONCE * (total - look.failed)):
        return None
    return (total - look.completed - look.failed) * look.at / look.completed


def noted(looks: Sequence[Look], look: Look) -> list[Look]:
    """Return the looks with one more, without those at which nothing moved; of many, every other old one."""
    kept = list(looks)
    if len(kept) > 1 and kept[-1][1:] == kept[-2][1:]:
        kept.pop()  # nothing moved at the last
    if len(kept) >= _MOST_LOOKS:
        kept = kept[: _MOST_LOOKS // 2 : 2] + kept[_MOST_LOOKS // 2 :]
    return [*kept, look]


def moves_of(looks: Sequence[Look]) -> list[Look]:
    """Return the looks at which more requests had succeeded than at the look before."""
    return [after for before, after in itertools.pairwise(looks) if after.completed > before.completed]


def _recent(moves: list[Look], now: float) -> list[Look]:
    """Return the moves of the last minute, and as many before it as a part of all that has finished needs."""
    first = len(moves) - 1
    while first > 0 and (
        now - moves[first - 1].at <= _WINDOW_SECONDS
        or moves[-1].completed - moves[first].completed < _WINDOW_SHARE * moves[-1].completed
    ):
        first -= 1
    return moves[max(0, first) :]
