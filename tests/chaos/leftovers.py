"""What a job leaves behind: once it has ended, nothing in Redis or the store may keep a worker alive."""

from typing import Any

from jobs.ledger import Ledger
from jobs.store import ObjectStore

# What outlives jobs: the last epoch, known models, when leases were looked at, answers kept for a minute, who
# sweeps and when that was, Celery's keys, whose messages are but wakes, and what scaling counts and workers
# report.
_KEPT = {
    "epoch",
    "fed_bytes",
    "models",
    "generation",
    "recovered",
    "reaped",
    "claims",
    "sweep",
    "swept",
    "celery",
    "work",
    "workers",
    "retiring",
}


def keys(ledger: Ledger, namespace: str) -> list[bytes]:
    """Return all keys of a ledger's namespace."""
    return list(ledger.redis.scan_iter(f"{{{namespace}}}:*", 1000))


def left(ledger: Ledger, store: ObjectStore, namespace: str) -> list[str]:
    """Name what is in Redis or open in the store that would not be there were no job ever made."""
    found = []
    for key in keys(ledger, namespace):
        name = key.decode().split(":", 1)[1]
        kind = name.split(":")[0]
        ttl: Any = ledger.redis.ttl(key)
        if kind not in _KEPT and not (kind == "job" and ttl > 0):
            found.append(name)
    if ledger.depth().fed_bytes:
        found.append("fed_bytes")
    return found + [marker.key for marker in store.list("open/")]
