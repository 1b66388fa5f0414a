"""How much of its prompts a plan can share: the prefix tree of sorted requests, by level.

Requests come sorted by their tokens, so what two neighbours have in common is all that is looked at. The tree
is the intervals of these lengths (Abouelhoda, Kurtz, Ohlebusch 2004: lcp-interval trees of sorted strings).
"""

import heapq
from dataclasses import dataclass, field
from typing import Any

from jobs import errors
from jobs.store import ObjectStore

NAME = "prefixes.json"
MOST_LEVELS = 12
"""Levels told apart; what lies deeper counts for the last."""
MOST_RUNS = 100
_WORD = 4


@dataclass
class Level:
    """All runs of one level: how many, the requests that have one, their tokens once, what sharing saves."""

    runs: int = 0
    requests: int = 0
    tokens: int = 0
    saved: int = 0


@dataclass
class _Open:
    """A run that the request before has too. It ends `depth` tokens from the start of the prompt."""

    depth: int
    first: int
    below: list[Level] = field(default_factory=list)


class Tree:
    """Gathers the tree of a plan, request by request; holds the path to the last one and sums, no prompts.

    A run is a stretch of tokens at one place of at least two prompts that are equal up to its end. The last
    token of a prompt is never shared: the first token of the answer is computed from it. Requests of
    different buckets or windows are not neighbours, so what they have in common counts in each.
    """

    def __init__(self) -> None:
        self.requests = self.tokens = self.shared = 0
        self._levels: list[Level] = []
        self._runs: list[tuple[int, int, int, int, int]] = []
        self._path: list[_Open] = []
        self._bucket, self._before, self._common = 0, b"", 0

    def add(self, bucket: int, prompt: bytes) -> None:
        """Take the next request of a plan: its prompt as words of 4 bytes, big-endian."""
        common = 0
        if bucket == self._bucket:
            common = _common(self._before, prompt, self._common)
            # Equal prompts and one that begins another: the last token is computed all the same.
            common = min(common, max(0, len(self._before) // _WORD - 1))
        self._turn(common)
        self._bucket, self._before = bucket, prompt
        self.requests += 1
        self.tokens += len(prompt) // _WORD
        self.shared += common
        self._common = common

    def end_window(self) -> None:
        """Close what is open: the next request is of another window."""
        self._turn(0)
        self._bucket, self._before = 0, b""

    def to_dict(self) -> dict[str, Any]:
        """Return the sums, the levels from the root on, and the runs that save most, in plan order."""
        self.end_window()
        names = ("first", "requests", "start", "tokens")
        runs = sorted((first, requests, start, tokens) for _, first, requests, start, tokens in self._runs)
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "shared": self.shared,
            "levels": [vars(level) for level in self._levels],
            "largest": [dict(zip(names, run, strict=True)) for run in runs],
        }

    def _turn(self, common: int) -> None:
        """Close the runs that a request with `common` tokens of the one before does not have."""
        first = self.requests - 1
        while self._path and self._path[-1].depth > common:
            ended = self._path.pop()
            first = ended.first
            parent = self._path[-1].depth if self._path else 0
            levels = self._close(ended, max(parent, common))
            if parent < common:
                self._path.append(_Open(common, first, levels))
                return
            _merge(self._path[-1].below if self._path else self._levels, levels)
        if common > (self._path[-1].depth if self._path else 0):
            self._path.append(_Open(common, first))

    def _close(self, run: _Open, start: int) -> list[Level]:
        """Return the levels of a run that is over and of those in it."""
        tokens, requests = run.depth - start, self.requests - run.first
        saved = tokens * (requests - 1)
        entry = (saved, run.first, requests, start, tokens)
        (heapq.heappush if len(self._runs) < MOST_RUNS else heapq.heappushpop)(self._runs, entry)
        levels = [Level(1, requests, tokens, saved), *run.below]
        if len(levels) > MOST_LEVELS:
            deepest = levels.pop()
            levels[-1].runs += deepest.runs
            levels[-1].tokens += deepest.tokens
            levels[-1].saved += deepest.saved
        return levels


def load(store: ObjectStore, job_id: str) -> bytes | None:
    """Return what the planner wrote of a job's prefixes as JSON, None if it wrote nothing."""
    # Plans of a job are equal whoever made them; the epoch of the one that counts is not known here.
    for found in store.list(f"jobs/{job_id}/plan/"):
        if found.key.endswith(f"/{NAME}"):
            try:
                return store.get(found.key)
            except errors.NotFound:
                return None  # another finalizer was first, and has removed the plan
    return None


def _merge(into: list[Level], levels: list[Level]) -> None:
    into += [Level() for _ in range(len(levels) - len(into))]
    for target, level in zip(into, levels, strict=False):
        target.runs += level.runs
        target.requests += level.requests
        target.tokens += level.tokens
        target.saved += level.saved


def _common(one: bytes, other: bytes, hint: int) -> int:
    """Return how many words two prompts have in common from the start; `hint` is a guess.

    Slices are compared at the speed of memory: two or so when the guess is right, else by bisection.
    """
    end = min(len(one), len(other)) // _WORD
    low = min(hint, end)
    if one[: low * _WORD] != other[: low * _WORD]:
        low, high = 0, low
    else:
        step = 1
        while (
            low + step <= end
            and one[low * _WORD : (low + step) * _WORD] == (other[low * _WORD : (low + step) * _WORD])
        ):
            low, step = low + step, step * 2
        high = min(low + step, end + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low * _WORD : middle * _WORD] == other[low * _WORD : middle * _WORD]:
            low = middle
        else:
            high = middle
    return low
