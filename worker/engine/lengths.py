"""How long outputs will be, learned from those that have ended."""

import math
from collections import deque

_KEPT = 256
_ENOUGH = 16


class OutputLengths:
    """Expects of a request what a quantile of finished ones with the same max_tokens stayed within."""

    def __init__(self, quantile: float = 0.9) -> None:
        self._quantile = quantile
        self._seen: dict[int, deque[int]] = {}

    def learn(self, max_tokens: int, length: int) -> None:
        self._seen.setdefault(max_tokens, deque(maxlen=_KEPT)).append(length)

    def expected(self, max_tokens: int) -> int:
        """Return how many tokens to plan for; max_tokens itself until enough requests have ended."""
        seen = self._seen.get(max_tokens, ())
        if len(seen) < _ENOUGH:
            return max_tokens
        return sorted(seen)[min(len(seen) - 1, math.ceil(len(seen) * self._quantile) - 1)]
