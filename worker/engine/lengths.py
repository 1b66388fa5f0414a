"""How long outputs will be, learned from those that have ended."""

import math
from collections import OrderedDict, deque

_KEPT = 256
_ENOUGH = 16
_JOBS = 64


class OutputLengths:
    """Expects of a request what a quantile of finished ones of its job, with the same max_tokens, stayed
    within. The jobs of which requests ended last are kept.
    """

    def __init__(self, quantile: float = 0.9) -> None:
        self._quantile = quantile
        self._jobs: OrderedDict[str, dict[int, deque[int]]] = OrderedDict()

    def learn(self, job: str, max_tokens: int, length: int) -> None:
        seen = self._jobs.setdefault(job, {})
        seen.setdefault(max_tokens, deque(maxlen=_KEPT)).append(length)
        self._jobs.move_to_end(job)
        if len(self._jobs) > _JOBS:
            self._jobs.popitem(last=False)

    def expected(self, job: str, max_tokens: int) -> int:
        """Return how many tokens to plan for; max_tokens itself until enough requests have ended."""
        seen = self._jobs.get(job, {}).get(max_tokens, ())
        if len(seen) < _ENOUGH:
            return max_tokens
        return sorted(seen)[min(len(seen) - 1, math.ceil(len(seen) * self._quantile) - 1)]
