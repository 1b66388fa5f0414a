"""How fast a job goes, or went, as a whole: one rule for `top` and the last line of `watch`."""

from typing import NamedTuple

from jobs.client import Batch

_ENDS = ("completed_at", "failed_at", "expired_at", "cancelled_at")


class Speed(NamedTuple):
    """Requests and generated tokens a second."""

    requests_per_second: float
    tokens_per_second: float


def speed(batch: Batch, now: float) -> Speed:
    """Return what its summary says of a job that has ended, else all that it did over how long it runs.

    The summary counts from the first request's start to the last one's end. A server that does not tell of
    it is older: then the loading of the model counts too.
    """
    ran = batch.running_seconds
    if ran is None:
        whole = seconds(batch, now)
        return Speed(batch.done / whole, batch.usage.output_tokens / whole)
    return Speed(batch.request_counts.completed / ran if ran else 0.0, batch.tokens_per_second or 0.0)


def seconds(batch: Batch, now: float) -> float:
    """Return how long a job has run, or did: at least a second, which is what its times are counted in."""
    if batch.in_progress_at is None:
        return float("inf")
    ended = next((at for name in _ENDS if (at := getattr(batch, name))), now)
    return max(1.0, float(ended) - float(batch.in_progress_at))


def never_ran(batch: Batch) -> int:
    """Return how many requests of a job that has ended early did not run."""
    return max(0, batch.request_counts.total - batch.done) if batch.ended else 0
