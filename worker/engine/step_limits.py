"""How much one step may hold: less after one was out of memory, and by and by as much as before."""

import logging
from typing import TypeVar

log = logging.getLogger(__name__)
_QUIET_STEPS = 64
"""After so many steps in a row that had memory, twice as much is tried."""
Each = TypeVar("Each")


class StepLimits:
    """The most prompt tokens and decoding sequences of a step, and whether tokens are drafted in it.

    While it is `tight`, a step chooses tokens for nobody but those whose last one it computes.
    """

    def __init__(self, prefill_tokens: int, decode_rows: int) -> None:
        self._most = prefill_tokens, decode_rows
        self._quiet = 0
        self.relax()

    @property
    def tight(self) -> bool:
        return not self.drafts or (self.prefill_tokens, self.decode_rows) != self._most

    def relax(self) -> None:
        """Allow as much as at first."""
        self.prefill_tokens, self.decode_rows = self._most
        self.drafts = True

    def shrink(self, tokens: int, rows: int, drafts: bool = False) -> bool:
        """Allow less than a step that was out of memory had: no drafts or, if it had none, half of what it
        had most of. False: it was one token, alone while limits were tight.
        """
        self._quiet = 0
        alone = tokens + rows <= 1
        # Of a token to prefill and one that decodes nothing is halved: what is tight computes them apart.
        if drafts or ((alone or tokens == rows == 1) and self.drafts):
            self.drafts = False
        elif alone:
            return False
        elif tokens >= rows:  # a step that is full of prompt tokens decodes nothing
            self.prefill_tokens = max(1, tokens // 2)
        else:
            self.decode_rows = rows // 2
        self._log("a step was out of memory")
        return True

    def grow(self) -> None:
        """Count a step that had memory; after many of them, allow twice as much."""
        if not self.tight:
            return
        self._quiet += 1
        if self._quiet == _QUIET_STEPS:
            self._quiet = 0
            self.prefill_tokens = min(2 * self.prefill_tokens, self._most[0])
            self.decode_rows = min(2 * self.decode_rows, self._most[1])
            self.drafts = True
            self._log("steps had memory")

    def turn(self, decode: list[Each], running: list[Each]) -> list[Each]:
        """Return who decodes in this step. When not all may, these go to the end of `running`: the others
        have their turn first.
        """
        if len(decode) <= self.decode_rows:
            return decode
        now = decode[: self.decode_rows]
        these = set(now)
        running[:] = [each for each in running if each not in these] + now
        return now

    def _log(self, event: str) -> None:
        names = ("prefill_tokens", "decode_rows", "drafts")
        log.warning(
            "%s: other limits from now on", event, extra={name: getattr(self, name) for name in names}
        )
