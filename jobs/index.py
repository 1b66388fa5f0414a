"""The ids of a tenant's jobs, newest first, found without reading all of a long index for one page."""

import time

from jobs import files, ids
from jobs.store import ObjectStore

_FIRST_SECONDS = 600.0
_MOST_GROWTH = 100.0


def newest(store: ObjectStore, tenant: str, count: int, after: str | None) -> list[str]:
    """Return up to `count` ids behind `after`, newest first.

    A store lists from the oldest name on, so a span of time before the page is listed, and a longer one, as
    the jobs in it make likely, when that is too little.
    """
    prefix = _prefix(tenant)
    until = time.time() if after is None else files.made_at(after)
    before = "" if after is None else prefix + after
    seconds = _FIRST_SECONDS
    while True:
        since = max(0.0, until - seconds)
        keys = [found.key for found in store.list(prefix, f"{prefix}batch_{ids.time_part(since)}", before)]
        if len(keys) >= count or not since:
            return [key.removeprefix(prefix) for key in sorted(keys, reverse=True)[:count]]
        # Twice as long as it should take: a third listing would cost more than some names too many.
        seconds *= min(_MOST_GROWTH, max(2.0, 2 * count / max(1, len(keys))))


def since(store: ObjectStore, tenant: str, at: float) -> list[str]:
    """Return the ids of the jobs made since a time (unix s)."""
    prefix = _prefix(tenant)
    found = store.list(prefix, f"{prefix}batch_{ids.time_part(max(0.0, at))}")
    return [one.key.removeprefix(prefix) for one in found]


def _prefix(tenant: str) -> str:
    return f"job-index/{tenant}/"
