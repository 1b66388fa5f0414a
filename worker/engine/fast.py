"""The fast engine: continuous batching over KV in place, every shared prefix computed and attended to
once.
"""

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterable

import torch

from worker.engine import (
    ahead,
    compiling,
    drafts,
    grammar,
    guards,
    heap,
    kv,
    kv_budget,
    leading,
    loader,
    pages,
    runner,
    sdpa,
    sizing,
    stepping,
)
from worker.engine import speculation as speculating
from worker.engine.base import Engine
from worker.engine.drafts import lookup
from worker.engine.drafts import opening as draft_opening
from worker.engine.embeddings import engine as embedding_engine
from worker.engine.embeddings.requests import EmbeddingRow
from worker.engine.native import library
from worker.engine.rows import RowState
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.types import Completion, EmbeddingRequest, EngineConfig, Request

log = logging.getLogger(__name__)
_NAP_SECONDS = 0.02
_MOST_STUCK = 100
"""Calls in a row that compute nothing while requests run: a fault, and no reason to run for ever."""


class FastEngine(Engine):
    """One step is one forward of the model: schedule, pack, run, choose tokens."""

    def __init__(
        self,
        loaded: loader.Loaded,
        config: EngineConfig,
        model: runner.Runner,
        clock: Callable[[], float] = time.monotonic,
        drafter: drafts.Drafter | None = None,
        budget: kv_budget.Budget | None = None,
    ) -> None:
        super().__init__(loaded.tokenizer, loaded.context_tokens, loaded.vocabulary, config)
        self._eos_ids = loaded.eos_ids
        self._grammars = grammar.Grammars(loaded.tokenizer, loaded.vocabulary, loaded.eos_ids)
        self._runner = model
        budget = budget or kv_budget.without_measuring(config, model.layout.device)
        self._memory: runner.Memory = model.memory(budget.kv_bytes)
        self.stats.kv_bytes_budget = self._memory.budget
        leading.add_host(model, self._memory, config.kv_host_bytes)
        self._stop_touching: Callable[[], None] = lambda: None
        self._clock = clock
        self._stuck = 0
        self._scheduler = Scheduler(self._memory, config, self.stats, clock)
        if drafter is None and config.speculate == "lookup":
            drafter = lookup.Lookup()
        speculation = speculating.Speculation(drafter, config, self.stats, model.layout.device.type)
        limits = sizing.graph_limits(config.max_running, budget.graph_bytes)
        self._stepper = stepping.Stepper(
            model,
            config,
            self._scheduler,
            speculation,
            self.stats,
            model.record(limits if config.cuda_graphs else None),
            self._take,
            self._fail,
        )

    @classmethod
    def over(cls, loaded: loader.Loaded, config: EngineConfig) -> "FastEngine":
        """Return an engine over a loaded model; raises sizing.DoesNotFit, or guards.Unsupported or
        attention_flash.Unavailable and leaves the model as it was.
        """
        compiler = compiling.choose(config.compile, loaded.device)
        ready = guards.prepare(loaded.model, leading.backend(config.attention, loaded.device), compiler)
        drafter = draft_opening.drafter(loaded, config)
        budget = kv_budget.of(loaded, config, ready)
        engine = cls(loaded, config, leading.lead(ready), drafter=drafter, budget=budget)
        compiler.count_in(engine.stats)
        engine.stats.dense_fallbacks = int(ready.no_flash is not None)
        engine.stats.plain_attention = int(sdpa.refusals() > 0)
        engine.stats.native_kernels = int(not ready.reads_beyond)
        engine._embedder, engine._no_embeddings = embedding_engine.packed(loaded, config, engine.stats)
        return engine

    def room(self) -> int:
        """Return how many more requests to claim now: a batch is to wait while the last one drains."""
        return max(0, self.config.max_running - len(self._waiting))

    def add(self, requests: Iterable[Request | EmbeddingRequest]) -> None:
        requests = list(requests)
        with heap.growing():
            super().add(requests)
            with self._lock:
                added = dict.fromkeys(row for r in requests for row in self._rows.get(r.id, ()))
            rows = [row for row in added if not isinstance(row, EmbeddingRow)]
            self._scheduler.add(
                (row, RowState(row, self.tokenizer, self._eos_ids, self._grammars)) for row in rows
            )

    def step(self) -> list[Completion]:
        started, model = time.perf_counter(), self._stepper.model_seconds
        with library.disabled(self.config.kernels == "torch"):
            idle = not self._advance()
        seconds = time.perf_counter() - started
        self.stats.step_seconds += seconds
        self.stats.scheduling_seconds += seconds - (self._stepper.model_seconds - model)
        embedded = self._embed(others=not idle, others_seconds=seconds)
        if idle and not embedded and self.expects_more and not self._ready:
            time.sleep(min(self._scheduler.held_seconds(), _NAP_SECONDS))
        return self._take_ready()

    def _advance(self) -> bool:
        """Admit and run what can be; False when the model has nothing to compute."""
        self._scheduler.sweep()
        misfit = self._scheduler.admit(self._admit, hold_back=self.expects_more)
        if misfit is not None:
            self._fail(misfit, "it does not fit into the memory for keys and values (kv_memory_bytes)")
        stepped = self._stepper.advance()
        if not self._running:  # maybe because a choice failed, and others with it: no step may follow
            self._stepper.settle()
            self._scheduler.sweep()
        self._stuck = 0 if stepped or not self._scheduler.running else self._stuck + 1
        if self._stuck > _MOST_STUCK:
            raise RuntimeError(f"no step can be planned for {len(self._scheduler.running)} running requests")
        self._stepper.speculation.sweep(self._scheduler.running)
        if self.config.prefix_ttl_seconds is not None:
            self._scheduler.trie.expire(self._clock() - self.config.prefix_ttl_seconds)
        self._count_memory()
        return stepped

    def forget_prefixes(self) -> None:
        """Drop all KV that no request uses."""
        self._scheduler.trie.clear()
        self._count_memory()

    def _count_memory(self) -> None:
        self.stats.kv_bytes_in_use = self._memory.used
        if isinstance(self._memory, pages.Memory) and self._memory.host is not None:
            self.stats.kv_host_bytes_in_use = self._memory.host.used
            self.stats.kv_host_evictions = self._memory.host.evictions

    def touch_memory(self) -> None:
        """Take the memory for keys and values from the system while there is no work."""
        if isinstance(self._memory, kv.Memory):
            self._stop_touching = self._memory.touch_while(lambda: not self.has_work)

    def close(self) -> None:
        if not hasattr(self, "_runner"):  # closed already
            return
        self._stop_touching()
        self._grammars.close()
        if isinstance(self._runner, leading.ParallelRunner):
            self._runner.close()
        self._forget_all()
        self._runner.record(None)
        self._memory = kv.Memory(self._memory.layout, self._memory.budget)
        del self._stepper
        self._scheduler = Scheduler(self._memory, self.config, self.stats, self._clock)
        del self._runner
        self._embedder = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _take(self, sequence: Sequence, token_id: int, now: float) -> None:
        """Note the next token of a sequence; hand it over if that ends it."""
        self.stats.tokens_sampled += 1
        completion = sequence.state.take(token_id, now)
        if completion is not None:
            ahead.drop_unread(sequence)
            self._hand_over(sequence, completion)

    def _hand_over(self, sequence: Sequence, completion: Completion) -> None:
        self._scheduler.finish(sequence)
        row = sequence.row
        known = dataclasses.replace(
            completion,
            cached_tokens=sequence.cached_tokens,
            draft_tokens=row.draft_tokens,
            draft_tokens_accepted=row.draft_tokens_accepted,
        )
        self._finish(row, known)

    def _fail(self, sequence: Sequence, reason: str) -> None:
        if not sequence.preempted:
            self._admit([sequence.row])  # first: what it raises leaves all as it was
        self._scheduler.drop(sequence)
        self._finish(sequence.row, self._completion(sequence.row, "error", error=reason))
