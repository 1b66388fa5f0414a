"""Where drafts come from: guesses of what a sequence goes on with, cheaper than a step of the model."""

from collections.abc import Collection
from typing import Protocol

from worker.engine.sequence import Sequence


class Drafter(Protocol):
    """Guesses the next tokens of sequences. A wrong guess costs time and changes no output."""

    @property
    def bytes_in_use(self) -> int:
        """How much memory for keys and values it holds."""
        ...

    def cost(self, sequences: int) -> float:
        """Return what one more token for each of so many sequences costs, a sequence: in the time that the
        model takes for one more token in a step.
        """
        ...

    def draft(self, sequences: list[Sequence], most: list[int]) -> list[list[int]]:
        """Return for each sequence what may follow its tokens: at most so many, or none."""
        ...

    def keep(self, running: Collection[Sequence]) -> None:
        """Forget all sequences but these."""
        ...
