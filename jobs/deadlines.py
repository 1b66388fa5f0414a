"""How fast work must go for every job to meet its deadline."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import redis

from jobs import ledger_answers as answers
from jobs.ledger_scripts import Keys


@dataclass(frozen=True)
class Due:
    """What is left of a job before its deadline (unix seconds).

    `fingerprint` None: it is not planned yet, so that its tokens are a guess. Else they are those of the
    prompts that are not finished.
    """

    job_id: str
    expires_at: float
    tokens: int
    fingerprint: str | None


def read(client: redis.Redis, keys: Keys) -> list[Due]:
    """Return all jobs that can still expire, the first deadline first."""
    found: Any = client.zrange(keys.name("deadlines"), 0, -1, withscores=True)
    deadlines = [(answers.text(name), ms / 1000) for name, ms in found]
    # No script and no transaction: of thousands of jobs, they would keep all others from Redis meanwhile.
    with client.pipeline(transaction=False) as asked:
        asked.hgetall(keys.name("open_tokens"))
        for name, _ in deadlines:
            asked.hget(keys.name("job", name), "fingerprint")
        tokens, *fingerprints = asked.execute()
    left = {answers.text(name): max(0, int(count)) for name, count in tokens.items()}
    return [
        Due(name, expires_at, left.get(name, 0), answers.text(fingerprint) if fingerprint else None)
        for (name, expires_at), fingerprint in zip(deadlines, fingerprints, strict=True)
    ]


def needed(jobs: Iterable[Due], now: float) -> dict[str, float]:
    """Return, for each fingerprint, the prompt tokens a second at which every planned job is in time.

    Work done by earliest deadline is in time if, for every deadline, all that is due by then fits before it
    (processor demand, Baruah et al. 1990). What is due within a second counts as due in one.
    """
    due: dict[str, int] = defaultdict(int)
    rates: dict[str, float] = defaultdict(float)
    for job in sorted(jobs, key=lambda one: one.expires_at):
        if job.fingerprint is not None:
            due[job.fingerprint] += job.tokens
            rate = due[job.fingerprint] / max(1.0, job.expires_at - now)
            rates[job.fingerprint] = max(rates[job.fingerprint], rate)
    return dict(rates)
