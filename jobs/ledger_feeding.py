"""The ledger's steps that move a job's plan into the queues: what the plan and feed units do."""

from collections.abc import Sequence
from typing import Any

import redis

from jobs import ledger_answers as answers
from jobs import ledger_scripts
from jobs.buckets import BOUNDS
from jobs.ledger_scripts import Argument
from jobs.ledger_types import FeedState, Unit
from jobs.records import PlannedRequest


class Feeding:
    """A part of `ledger.Ledger`, which sets these."""

    redis: redis.Redis
    _keys: ledger_scripts.Keys
    _scripts: ledger_scripts.Scripts
    _window: int
    _budget: int

    def begin_plan(self, unit: Unit, total: int, model: str, fingerprint: str) -> None:
        """Set what the plan found and start its list of shards anew; raises LeaseLost."""
        self._on_model("begin_plan", unit.job_id, unit.token, total, model, fingerprint)

    def add_shards(self, unit: Unit, shards: Sequence[str], planned: int) -> None:
        """Release shards (names unique over all epochs) with `planned` requests to feed; raises LeaseLost."""
        keys = self._keys.of(job=unit.job_id)
        self._scripts.run("add_shards", keys, unit.job_id, unit.token, planned, *shards)

    def end_plan(self, unit: Unit, planned: int | None = None, tokens: int = 0) -> None:
        """Close the plan: all shards are released. Ends the work when nothing is left; raises LeaseLost.

        `planned` requests were released in all, whose prompts (followers' too) have so many `tokens`;
        LeaseLost too when Redis has lost some of their shards.
        """
        args = (unit.job_id, unit.token, "" if planned is None else planned, tokens)
        self._scripts.run("end_plan", self._keys.of(job=unit.job_id), *args)

    def feed_state(self, unit: Unit) -> FeedState:
        """Return what to feed next and how much; raises LeaseLost (also when the job has been fed)."""
        state = self._on_model("feed_state", unit.job_id, unit.token, self._window, self._budget)
        shard, offset, requests, size, planned = state
        return FeedState(answers.text(shard) if shard else None, offset, requests, size, bool(planned))

    def feed(
        self, unit: Unit, shard: str, offset: int, requests: Sequence[PlannedRequest], last: bool
    ) -> bool:
        """Enqueue the shard's requests from `offset` on; `last`: the shard is used up. Raises LeaseLost.

        Returns False when the cursor is not at `offset`: ask for the feed_state again.
        """
        args: list[Argument] = []
        for request in requests:
            if request.bucket not in BOUNDS or not request.id.startswith(unit.job_id + ":"):
                raise ValueError(
                    f"request {request.id!r} of bucket {request.bucket} is none of {unit.job_id}"
                )
            rows = ",".join(map(str, request.rows))
            args += [request.id, request.bucket, rows, request.to_json()]
        return bool(self._on_model("feed", unit.job_id, unit.token, shard, offset, int(last), *args))

    def _on_model(self, script: str, job_id: str, *args: Argument, fingerprint: str | None = None) -> Any:
        """Run a script that needs the job's model; the fingerprint may change under us, then ask again."""
        if fingerprint is None:
            stored = self.redis.hget(self._keys.name("job", job_id), "fingerprint")
            fingerprint = answers.text(stored or b"")
        while True:
            keys = self._keys.of(job=job_id, model=fingerprint)
            try:
                return self._scripts.run(script, keys, job_id, fingerprint, *args)
            except ledger_scripts.OtherModel as other:
                fingerprint = other.fingerprint
