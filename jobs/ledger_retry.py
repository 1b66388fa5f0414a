"""How often the ledger repeats a call to Redis: a few times, but not for longer than its caller can wait."""

import threading
import time
from collections.abc import Callable
from typing import Any

from redis.backoff import ExponentialBackoff
from redis.retry import Retry

_inside = threading.local()


class Bounded(Retry):
    """Repeats up to 3 times, none of which begins later than `seconds` after the first try did.

    redis-py connects with repeats of its own within each repeat of a command. Those are left out: of a Redis
    that hangs each waits for its timeout, which takes minutes together.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(ExponentialBackoff(cap=1, base=0.05), 3)
        self._seconds = seconds

    def call_with_retry(
        self, do: Callable[[], Any], fail: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Call `do` until it works; `fail` hears of each error."""
        outermost = not getattr(_inside, "it", False)
        until = time.monotonic() + self._seconds

        def failed(error: Exception, *count: int) -> None:
            fail(error, *count)
            if not outermost or time.monotonic() >= until:
                raise error

        _inside.it = True
        try:
            return super().call_with_retry(do, failed, *args, **options)
        finally:
            _inside.it = not outermost
