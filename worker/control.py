"""The steps of a job itself, run on any worker: plan, feed, finalize, reap."""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from threading import Lock
from typing import Any

from jobs import errors, feed, finalize, plan, reap, results, schema, tokens
from jobs import log as log_lines
from jobs.ledger import Finished, Job, Ledger, State, Unit
from jobs.metrics import shared
from jobs.records import NO_USAGE, JobRecord, Manifest, ResultRow
from jobs.settings import Settings
from jobs.store import ObjectStore

log = logging.getLogger(__name__)
RETRY_SECONDS = 10.0
PLANS_AT_ONCE = 2
"""They share one interpreter: more of them make none faster, and who comes next waits for all."""
TENANTS_AT_ONCE = 6
"""So many plans run when all beyond the first two are of other tenants, who are not to wait for those."""
PLAN_ATTEMPTS = 5
"""A plan whose worker vanished this often fails its job: something in its input ends processes."""


class Control:
    """Claims units and runs them, from any thread; `on_fed` hears which model got requests.

    `on_ended` hears of each unit that ended, when it began (unix seconds), and the name of what it raised.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        store: ObjectStore,
        on_fed: Callable[[str], None],
        on_ended: Callable[[Unit, float, str | None], None] = lambda unit, began, error: None,
    ) -> None:
        self._settings, self._ledger, self._store = settings, ledger, store
        self._on_fed, self._on_ended = on_fed, on_ended
        self._held: dict[str, Unit] = {}
        self.claimed = 0
        self._lock, self._planners = Lock(), Lock()

    def warm(self) -> None:
        """Load the tokenizers of the served models, so that the first plan does not wait for imports."""
        for name in self._settings.models:
            self._tokenizer(name)

    def run_unit(
        self, kind: str | None = None, job_id: str | None = None, besides: str | None = None
    ) -> bool:
        """Claim and run one unit that is due; False if there is none, or no more plans may run here."""
        unit = self._claim(kind, job_id, besides)
        if unit is None:
            return False
        began = time.time()
        failure: str | None = None
        try:
            with log_lines.about(job=unit.job_id, unit=unit.kind):
                self._run(unit)
        except errors.LeaseLost as error:
            failure = type(error).__name__
            log.warning("unit lost", extra=_about(unit))
        except Exception as error:
            failure = type(error).__name__
            self._give_back(unit, error)
        finally:
            with self._lock:
                del self._held[unit.token]
        self._on_ended(unit, began, failure)
        return True

    def _give_back(self, unit: Unit, error: Exception) -> None:
        expected = isinstance(error, errors.LonghaulError)
        reason = errors.advised(error, "Check LONGHAUL_MODELS.")
        # Whose job it is will read it: what nobody foresaw may tell too much.
        told = reason if expected else f"{type(error).__name__}; the worker's log says more"
        failures = None
        try:
            failures = self._ledger.release_unit(unit, RETRY_SECONDS, told)
        finally:
            extra = _about(unit) | {"failures": failures, "reason": reason, "retry_seconds": RETRY_SECONDS}
            log.error("unit failed", extra=extra, exc_info=None if expected else error)

    def _claim(self, kind: str | None, job_id: str | None, besides: str | None) -> Unit | None:
        # Who may get a plan looks and claims alone: of three at once, each would see too few.
        with self._planners if kind in (None, "plan") and besides != "plan" else nullcontext():
            with self._lock:
                planning = [unit.job_id for unit in self._held.values() if unit.kind == "plan"]
            if len(planning) >= TENANTS_AT_ONCE:
                if kind == "plan":
                    return None
                besides = "plan"
            unlike = planning if len(planning) >= PLANS_AT_ONCE else ()
            unit = self._ledger.claim_unit(kind, job_id, besides=besides, unlike=unlike)
            if unit is not None:
                with self._lock:
                    self._held[unit.token] = unit
                    self.claimed += 1
            return unit

    @property
    def held(self) -> int:
        """How many units run here."""
        return len(self._held)

    def extend(self) -> None:
        """Renew the leases of the units that run here."""
        with self._lock:
            held = list(self._held.values())
        for unit in held:
            self._ledger.extend_unit(unit)

    def reap(self) -> None:
        """Put back what dead workers held, give up what kills them, end what is past its time."""
        reap.reap(self._settings, self._ledger, self._store)

    def _run(self, unit: Unit) -> None:
        started = time.monotonic()
        if unit.kind == "feed":
            self._feed(unit)
            return
        {"plan": self._plan, "finalize": self._finalize}[unit.kind](unit)
        log.info("unit done", extra=_about(unit) | {"seconds": round(time.monotonic() - started, 3)})

    def _record(self, job_id: str) -> JobRecord:
        return JobRecord.from_json(self._store.get(f"jobs/{job_id}/job.json"))

    def _feed(self, unit: Unit) -> None:
        job = self._ledger.job(unit.job_id)
        if feed.feed(self._ledger, self._store, unit) and job and job.fingerprint:
            self._on_fed(job.fingerprint)

    def _plan(self, unit: Unit) -> None:
        record = self._record(unit.job_id)
        sink = _PlanSink(unit, self._settings, self._ledger, self._store)
        prefix = f"jobs/{record.id}/plan/{unit.epoch}/"
        if unit.attempts > PLAN_ATTEMPTS:
            message = f"Planning ended its worker {PLAN_ATTEMPTS} times."
            self._fail(unit, record, [schema.LineError(code="plan_failed", message=message)])
            return
        planner = plan.Planner(record, self._settings, self._store, self._tokenizer, prefix)
        try:
            planner.plan(sink)
        except plan.InvalidInput as invalid:
            self._fail(unit, record, invalid.errors)
            return
        self._ledger.end_plan(unit, sink.planned, sink.tokens)
        self.run_unit("feed", record.id)

    def _tokenizer(self, name: str) -> tokens.Tokenizer:
        return tokens.cached(name, self._settings.models[name])

    def _fail(self, unit: Unit, record: JobRecord, found: list[schema.LineError]) -> None:
        job = self._ledger.job(record.id)
        if job is None or job.state is not State.VALIDATING or job.completed:
            # Its input was good once, and results of it lie there: a setting was changed, and may come back.
            raise errors.Unavailable(f"Job {record.id} had begun and cannot be planned: {found[0].message}")
        times = {"created_at": record.created_at, "failed_at": max(time.time(), record.created_at)}
        manifest = Manifest(
            job_id=record.id,
            state="failed",
            model=None,
            times=times,
            total=0,
            completed=0,
            failed=0,
            usage=NO_USAGE,
            files={},
            errors=[error.model_dump() for error in found],
        )
        if not self._ledger.extend_unit(unit):
            raise errors.LeaseLost(what=f"plan of {record.id}")
        manifest = finalize.publish(self._store, record, manifest)
        # The marker first: what dies between the two is done again for the unit, which nobody closed.
        finalize.close(self._store, record.id)
        self._ledger.fail(unit, manifest)

    def _finalize(self, unit: Unit) -> None:
        record, job = self._record(unit.job_id), self._ledger.job(unit.job_id)
        if job is None:
            raise errors.LeaseLost(what=f"finalize of {record.id}")
        manifest = finalize.found(self._store, record.id) or self._merge(unit, record, job)
        if not self._ledger.extend_unit(unit):
            raise errors.LeaseLost(what=f"finalize of {record.id}")
        manifest = finalize.publish(self._store, record, manifest)
        # The marker first: what dies between the two is done again for the unit, which nobody closed.
        finalize.close(self._store, record.id)
        self._ledger.finish(unit, manifest)
        for shard in self._store.list(f"jobs/{record.id}/plan/"):
            self._store.delete(shard.key)

    def _merge(self, unit: Unit, record: JobRecord, job: Job) -> Manifest:
        state = job.outcome or "completed"
        merge = finalize.Merge(
            record, state, self._store, self._settings, f"jobs/{record.id}/out/{unit.epoch}/"
        )
        times = job.times | {f"{state}_at": max(time.time(), *job.times.values())}
        return merge.run(self._ledger.parts(record.id), job.total, job.model, times)


def _about(unit: Unit) -> dict[str, Any]:
    return {"unit": unit.kind, "job": unit.job_id, "attempts": unit.attempts}


class _PlanSink:
    """Tells the ledger, window by window, what the planner found; its lease is checked at each step."""

    def __init__(self, unit: Unit, settings: Settings, ledger: Ledger, store: ObjectStore) -> None:
        self._unit, self._settings, self._ledger, self._store = unit, settings, ledger, store
        self._part = results.Part(unit.job_id)
        self._model = ""
        self.planned = self.tokens = 0

    def begin(self, total: int, model: str) -> None:
        self._model = model
        self._ledger.begin_plan(self._unit, total, model, self._settings.fingerprints[model])

    def refuse(self, rows: list[ResultRow]) -> None:
        self._part.add(rows)
        if self._part.bytes >= self._settings.flush_bytes:
            self._flush()

    def release(self, shards: list[str], planned: int, tokens: int) -> None:
        self._flush()
        self._ledger.add_shards(self._unit, shards, planned)
        self.planned += planned
        self.tokens += tokens

    def _flush(self) -> None:
        if not self._part.rows:
            return
        self._part.write(self._store)
        job_id = self._unit.job_id
        rows = [Finished(f"{job_id}:{row.row}", None, row.row, row.failed) for row in self._part.rows]
        known = self._ledger.complete(None, job_id, self._part.name, rows)
        shared.requests_finished.labels(self._model, "refused").inc(len(rows) - len(known))
        self._part = results.Part(job_id)
