"""Arrival patterns: jobs with a time, a number of requests, tokens of each, and a deadline.

No recording of a production queue is there to be replayed. Sizes are derived: tokens a request from the
shapes of bench/workloads.py (`shared` 650 in, 64 out; `nested` 490 in, 32 out; `mixed` up to 1,000 in and 128
out) and from chats with long answers; jobs have up to 50,000 requests, the most that
LONGHAUL_MAX_REQUESTS_PER_JOB allows, and a bulk load is many such jobs. Times are seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
DAY = 86_400.0
HOUR = 3_600.0
MOST_REQUESTS = 50_000
SHAPES = ((650, 64), (490, 32), (500, 60), (300, 600))
"""(prompt, output) tokens of a request: shared, nested, mixed, chats with long answers."""


@dataclass(frozen=True)
class Jobs:
    """Arrays [J], sorted by arrival. `longest` is the output of the job's longest request, in tokens."""

    arrival: Array
    requests: Array
    tokens: Array
    longest: Array
    deadline: Array

    @property
    def work(self) -> Array:
        """Tokens of each job."""
        return self.requests * self.tokens


def build(name: str, seed: int) -> Jobs:
    """Return a pattern; raises KeyError for an unknown name."""
    return PATTERNS[name](np.random.default_rng(seed))


def _jobs(
    rng: np.random.Generator, arrival: Array, requests: Array, window: Array | float, tail: float = 4.0
) -> Jobs:
    arrival = np.sort(arrival)
    shape = np.array(SHAPES, dtype=float)[rng.integers(len(SHAPES), size=len(arrival))]
    requests = np.clip(np.round(requests), 1, MOST_REQUESTS)
    return Jobs(arrival, requests, shape.sum(1), tail * shape[:, 1], arrival + window)


def poisson(rng: np.random.Generator) -> Jobs:
    """A job every ten minutes on average, over a day; sizes lognormal, the median 500 requests."""
    arrival = np.cumsum(rng.exponential(600, int(DAY / 600)))
    return _jobs(rng, arrival, rng.lognormal(np.log(500), 1.2, len(arrival)), 24 * HOUR)


def nightly(rng: np.random.Generator) -> Jobs:
    """40 full jobs within minutes of one in the morning, three nights, and little else."""
    nights = [day * DAY + HOUR + rng.uniform(0, 600, 40) for day in range(3)]
    small = rng.uniform(0, 3 * DAY, 20)
    arrival = np.concatenate([*nights, small])
    requests = np.concatenate([np.full(120, 50_000.0), rng.lognormal(np.log(200), 1, 20)])
    order = np.argsort(arrival)
    return _jobs(rng, arrival, requests[order], 8 * HOUR)


def bursts(rng: np.random.Generator) -> Jobs:
    """Bursts of 5 to 20 jobs in two minutes, every two hours or so, over two days."""
    starts = np.cumsum(rng.exponential(2 * HOUR, 24))
    arrival = np.concatenate([start + rng.uniform(0, 120, rng.integers(5, 21)) for start in starts])
    return _jobs(rng, arrival, rng.lognormal(np.log(3000), 1, len(arrival)), 2 * HOUR)


def diurnal(rng: np.random.Generator) -> Jobs:
    """Days that are busy at noon and still at night, for three days: about 400 jobs a day."""
    arrival = rng.uniform(0, 3 * DAY, 4000)
    keep = rng.uniform(size=4000) < 0.5 * (1 - np.cos(2 * np.pi * arrival / DAY)) ** 2 / 1.5
    arrival = np.sort(arrival[keep])
    return _jobs(rng, arrival, rng.lognormal(np.log(800), 1.3, len(arrival)), 12 * HOUR)


def long_tail(rng: np.random.Generator) -> Jobs:
    """Sizes by a power law, and requests whose longest output is forty times the usual."""
    arrival = np.cumsum(rng.exponential(900, 150))
    return _jobs(rng, arrival, 50 * rng.pareto(0.9, 150) + 1, 24 * HOUR, tail=40.0)


def giant(rng: np.random.Generator) -> Jobs:
    """200 full jobs at once, ten million requests: one bulk load, and nothing else."""
    return _jobs(rng, rng.uniform(0, 60, 200), np.full(200, 50_000.0), 24 * HOUR)


def deadlines(rng: np.random.Generator) -> Jobs:
    """Jobs due in fifteen minutes, an hour or a day, mixed, over a day."""
    arrival = np.sort(rng.uniform(0, DAY, 120))
    windows = rng.choice([0.25 * HOUR, HOUR, 24 * HOUR], 120, p=[0.4, 0.3, 0.3])
    return _jobs(rng, arrival, rng.lognormal(np.log(3000), 1.2, 120), windows)


def trickle(rng: np.random.Generator) -> Jobs:
    """A few requests every half a minute, for half a day: one worker has little to do, and always some."""
    arrival = np.cumsum(rng.exponential(30, int(DAY / 60)))
    return _jobs(rng, arrival, rng.integers(1, 20, len(arrival)).astype(float), HOUR)


PATTERNS: dict[str, Callable[[np.random.Generator], Jobs]] = {
    made.__name__: made for made in (poisson, nightly, bursts, diurnal, long_tail, giant, deadlines, trickle)
}
