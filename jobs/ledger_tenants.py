"""The ledger's tenants: what each has open, against its quotas, and what waits or runs for it."""

from collections import Counter
from typing import Any

import redis

from jobs import ledger_answers as answers
from jobs.buckets import BOUNDS
from jobs.ledger_scripts import Argument, Keys, Scripts
from jobs.ledger_types import UNITS, Depth, Failing, ModelDepth

_RESERVED_MS = 60_000
"""How long a job that was let in may take to be entered; then its place is free again."""
_UPLOAD_MS = 3600_000


class Tenants:
    """Counters by tenant. A tenant's name has lower case letters, digits and dashes only."""

    def __init__(self, client: redis.Redis, keys: Keys, scripts: Scripts) -> None:
        self._client, self._keys, self._scripts = client, keys, scripts

    def reserve(
        self,
        tenant: str,
        job_id: str,
        requests: int,
        tokens: int,
        most_requests: int | None,
        most_tokens: int | None,
    ) -> tuple[str, int] | None:
        """Count a job that is about to be entered as open, unless a quota refuses it (None: no limit).

        Returns what would be exceeded ('requests' or 'tokens') and how much of it is taken; None: it is in.
        """
        most = ("" if limit is None else limit for limit in (most_requests, most_tokens))
        answer = self._run("reserve", job_id, tenant, requests, tokens, *most, _RESERVED_MS)
        return (answers.text(answer[0]), int(answer[1])) if answer else None

    def give_back(self, tenant: str, job_id: str) -> None:
        """Forget a reservation; the job was not entered."""
        self._run("give_back", job_id, tenant)

    def wait_seconds(self, tenant: str, per_minute: int) -> float:
        """Let one more call of the tenant pass (0), or return after how many seconds to try again."""
        return float(self._run("pass", "", tenant, per_minute)) / 1000

    def hold_bytes(self, tenant: str, upload: str, size: int) -> int:
        """Count a file as the tenant's while it is stored; returns the bytes of its other such files."""
        return int(self._run("hold_bytes", "", tenant, upload, size, _UPLOAD_MS))

    def let_bytes_go(self, tenant: str, upload: str, size: int) -> None:
        """Count it no more: its record lies in the store, or it was refused."""
        self._run("let_bytes_go", "", tenant, upload, size)

    def open_jobs(self, tenant: str) -> list[str]:
        """Return the ids of the tenant's jobs that have not ended."""
        found: Any = self._client.zrange(self._keys.name("open", tenant), 0, -1)
        return list(map(answers.text, found))

    def depth(self, tenant: str) -> Depth:
        """Return what is left to do for one tenant."""
        ids = self.open_jobs(tenant)
        live: Counter[str] = Counter()
        units = 0
        failing: list[Failing] = []
        # No script and no transaction: of thousands of jobs, they would keep all others from Redis meanwhile.
        with self._client.pipeline(transaction=False) as asked:
            for name in ids:
                asked.hget(self._keys.name("job", name), "fingerprint")
                asked.scard(self._keys.name("live", name))
                for what in ("control", "unit_failures"):
                    asked.hmget(self._keys.name(what), [f"{kind}:{name}" for kind in UNITS])
            found = iter(asked.execute())
        for name, fingerprint, count, control, failed in zip(ids, found, found, found, found, strict=True):
            units += sum(unit is not None for unit in control)
            of_kind = zip(UNITS, failed, strict=True)
            failing += [answers.failing(f"{kind}:{name}", why) for kind, why in of_kind if why]
            if fingerprint:
                live[answers.text(fingerprint)] += count
        models = {name: self._model_depth(tenant, name, live[name]) for name in sorted(live)}
        return Depth(models, units, failing=tuple(failing))

    def _model_depth(self, tenant: str, model: str, live: int) -> ModelDepth:
        names = [self._keys.name("queue", model, bound, tenant) for bound in BOUNDS]
        queues = self._scripts.look([("LLEN", name) for name in names])
        return answers.depth((live, max(0, live - sum(queues)), 0, 1, *queues))

    def _run(self, script: str, *args: Argument) -> Any:
        return self._scripts.run(script, self._keys.of(), *args)
