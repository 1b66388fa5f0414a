"""Prompt lookup: what followed the last few tokens when they came before in prompt or output
(Saxena 2023).
"""

import math
from collections.abc import Collection
from weakref import WeakKeyDictionary

from worker.engine.sequence import Sequence

_LONGEST, _SHORTEST = 4, 2


class Lookup:
    """Copies from a sequence's own tokens. Has no model, so that it costs next to nothing."""

    bytes_in_use = 0

    def __init__(self) -> None:
        self._indices: WeakKeyDictionary[Sequence, Index] = WeakKeyDictionary()

    def cost(self, sequences: int) -> float:
        """See Drafter."""
        return 0.0

    def draft(self, sequences: list[Sequence], most: list[int]) -> list[list[int]]:
        """See Drafter."""
        return [self._index(sequence).draft(count) for sequence, count in zip(sequences, most, strict=True)]

    def keep(self, running: Collection[Sequence]) -> None:
        """See Drafter. An index goes with its sequence."""

    def _index(self, sequence: Sequence) -> "Index":
        if sequence not in self._indices:
            self._indices[sequence] = Index(sequence.tokens)
        return self._indices[sequence]


class Index:
    """Where each run of 4, 3 and 2 tokens was last followed by another one. `tokens` may grow."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._read = 0
        self._follower: dict[int, int] = {}
        """Hash of a run -> position of what followed it. Two runs of one hash cost a wrong guess."""

    def draft(self, most: int) -> list[int]:
        """Return what followed the longest run that the tokens end with and that came before; [] if none."""
        self._catch_up()
        tokens = self._tokens
        for size in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            at = self._follower.get(hash(tuple(tokens[-size:])))
            if at is not None:
                copied = tokens[at : at + most]
                # A copy that runs into its own beginning goes on: the text repeats itself.
                return (copied * math.ceil(most / len(copied)))[:most]
        return []

    def _catch_up(self) -> None:
        tokens = self._tokens
        for at in range(self._read, len(tokens)):
            for size in range(_SHORTEST, min(_LONGEST, at) + 1):
                self._follower[hash(tuple(tokens[at - size : at]))] = at
        self._read = len(tokens)
