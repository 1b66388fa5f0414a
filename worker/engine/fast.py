"""The fast engine: continuous batching over KV in place, every shared prefix computed and attended to
once.
"""

import dataclasses
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from worker.engine import (
    ahead,
    backoff,
    choosing,
    compiling,
    drafts,
    grammar,
    guards,
    heap,
    kv,
    kv_budget,
    leading,
    loader,
    packing,
    pages,
    prefix,
    runner,
    sdpa,
    sizing,
)
from worker.engine import speculation as speculating
from worker.engine.base import Engine
from worker.engine.drafts import lookup
from worker.engine.drafts import opening as draft_opening
from worker.engine.embeddings import engine as embedding_engine
from worker.engine.embeddings.requests import EmbeddingRow
from worker.engine.native import library
from worker.engine.paged_step import PagedStep
from worker.engine.rows import RowState
from worker.engine.scheduler import Batch, Scheduler
from worker.engine.sequence import Sequence
from worker.engine.types import Completion, EmbeddingRequest, EngineConfig, Request

log = logging.getLogger(__name__)
_FEW = 8
_NAP_SECONDS = 0.02
_OUT_OF_MEMORY = "out of memory: there is none left to compute even one token of it at a time"


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
        leading.add_host(model, self._memory, config.kv_host_bytes)
        self._pack = model.packer(self._memory, config.cascade)
        limits = sizing.graph_limits(config.max_running, budget.graph_bytes)
        self._recorded = model.record(limits if config.cuda_graphs else None)
        self._runs_ahead = config.run_ahead and model.device.ahead and self._memory.paged
        self._flight: ahead.Flight | None = None
        self._stop_touching: Callable[[], None] = lambda: None
        self._clock = clock
        self._model_seconds = 0.0
        self._scheduler = Scheduler(self._memory, config, self.stats, clock)
        if drafter is None and config.speculate == "lookup":
            drafter = lookup.Lookup()
        self._speculation = speculating.Speculation(drafter, config, self.stats, model.layout.device.type)

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
        started, model = time.perf_counter(), self._model_seconds
        with library.disabled(self.config.kernels == "torch"):
            idle = not self._advance()
        seconds = time.perf_counter() - started
        self.stats.step_seconds += seconds
        self.stats.scheduling_seconds += seconds - (self._model_seconds - model)
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
        if not self._can_stay_ahead():
            self._settle()
        self._continue_from(self._ready_prompts())
        settled = self._flight is None
        batch = self._scheduler.next_batch()
        if batch is not None:
            if self._scheduler.limits.drafts:
                batch = self._speculation.extend(batch, self._scheduler.running)
            self._run(batch)
        else:
            self._settle()
        if not self._running:  # maybe because a choice failed, and others with it: no step may follow
            self._scheduler.sweep()
        self._speculation.sweep(self._scheduler.running)
        if self.config.prefix_ttl_seconds is not None:
            self._scheduler.trie.expire(self._clock() - self.config.prefix_ttl_seconds)
        self._count_memory()
        return batch is not None or not settled

    def _can_stay_ahead(self) -> bool:
        """Tell whether the next step can be chosen and computed while tokens are unread."""
        running = self._scheduler.running
        return not (
            self._speculation.drafts_among(len(running))
            or self._ready_prompts()
            # Else whoever is preempted would have to know all its tokens.
            or not isinstance(self._memory, pages.Memory)
            or ahead.needed_pages(running) > self._memory.free_pages
            or any(map(ahead.waits_for_host, running))
        )

    def _settle(self) -> None:
        """Read the tokens that are on their way, and be ahead no more."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._read(flight)

    def _read(self, flight: ahead.Flight) -> None:
        with self._model_runs():
            ids = flight.wait()
        now = time.monotonic()
        for sequence, token_id in flight.tokens(ids):
            self._take(sequence, token_id, now)

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
        self._flight = None
        self._runner.record(None)
        self._memory = kv.Memory(self._memory.layout, self._memory.budget)
        del self._pack
        self._scheduler = Scheduler(self._memory, self.config, self.stats, self._clock)
        self._speculation = speculating.Speculation(None, self.config, self.stats, "cpu")
        del self._runner
        self._embedder = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run(self, batch: Batch) -> None:
        last = self._flight
        computed = backoff.tried(lambda: self._compute(batch, last))
        if computed is None:
            self._back_off(batch)
            return
        packed, logits, sequences, chosen = computed
        self._scheduler.limits.grow()
        self._count_tokens(batch)
        if not isinstance(chosen, list):
            self._flight = chosen
            if last is not None:
                self.stats.steps_ahead += 1
                self._read(last)
            return
        assert last is None
        self._take_all(sequences, chosen)
        if len(sequences) < len(logits):
            self._speculation.accept(packed.drafted, functools.partial(self._choose_from, logits))
            self._continue_from(self._ready_prompts())

    def _compute(
        self, batch: Batch, last: ahead.Flight | None
    ) -> tuple[packing.Packed, Tensor, list[Sequence], list[int] | ahead.Flight | None]:
        """Compute a step and choose tokens; return who is to take them, and the tokens, maybe unread. What it
        raises leaves all as it was, once the batch is taken back.
        """
        packed = self._pack(batch)
        if last is not None:
            assert isinstance(packed.step, PagedStep)
            ahead.carry(last, batch.decode, packed.step, self._runner.device)
        with self._model_runs():
            logits = self._runner.step(packed.step)
        self._count_step(batch, packed.step.attention_calls)
        rows, sequences = [], []
        for row, end in enumerate(packed.ends):
            if isinstance(end, prefix.Node):
                end.logits = logits[row].clone()
            elif isinstance(end, Sequence):
                rows.append(row)
                sequences.append(end)
        for scored in packed.scored:
            scored.sequence.state.score_prompt(scored.first, logits[scored.rows])
        if self._runs_ahead and not (
            packed.scored or packed.drafted or any(map(ahead.waits_for_host, sequences))
        ):
            return packed, logits, sequences, self._launch(sequences, rows, logits)
        those = logits if len(rows) == len(logits) else _rows_of(logits, rows)
        return packed, logits, sequences, self._next_tokens(sequences, those)

    def _back_off(self, batch: Batch) -> None:
        """Plan less than a batch that was out of memory; fail who cannot run alone."""
        backoff.take_back(batch, self._scheduler)
        was_ahead = self._flight is not None
        self._settle()  # whose token it was may have ended
        tokens = sum(len(chunk.tokens) for chunk in batch.chunks)
        if not (self._shrink(tokens, len(batch.decode), bool(batch.drafts)) or was_ahead):
            self._fail(backoff.alone(batch, self._scheduler), _OUT_OF_MEMORY)

    def _shrink(self, tokens: int, rows: int, drafts: bool = False) -> bool:
        """Have less in the next steps than one that was out of memory had; False when nothing is less."""
        self.stats.out_of_memory_splits += 1
        limits = self._scheduler.limits
        if limits.shrink(tokens, rows, drafts) or self._speculation.stop():
            return True
        limits.relax()  # what ends now may have been the cause
        return False

    def _launch(self, sequences: list[Sequence], rows: list[int], logits: Tensor) -> ahead.Flight | None:
        """Choose tokens on the device and leave them unread."""
        device = self._runner.device
        if len(rows) < len(logits):
            logits = logits.index_select(0, device.stage(np.array(rows, dtype=np.int64)))
        ready = self._ready_prompts()
        if self._scheduler.limits.tight or any(map(ahead.waits_for_host, ready)):
            ready = []  # the next step settles for them
        if ready:
            logits = torch.cat([logits, _prompt_logits(ready)])
        sequences = sequences + ready
        return ahead.launch(sequences, logits, device) if sequences else None

    @contextmanager
    def _model_runs(self) -> Iterator[None]:
        """Count the seconds that are not spent on scheduling."""
        started = time.perf_counter()
        yield
        self._model_seconds += time.perf_counter() - started

    def _ready_prompts(self) -> list[Sequence]:
        """Return sequences whose whole prompt is a prefix of which the next logits are known."""
        return [s for s in self._scheduler.running if not s.own_tokens and s.node.logits is not None]

    def _continue_from(self, sequences: list[Sequence]) -> None:
        sequences = sequences[: self._scheduler.limits.decode_rows]
        if not sequences:
            return
        token_ids = backoff.tried(lambda: self._next_tokens(sequences, _prompt_logits(sequences)))
        if token_ids is not None:
            self._take_all(sequences, token_ids)
        elif not self._shrink(0, len(sequences)):
            self._fail(sequences[0], _OUT_OF_MEMORY)

    def _choose_from(self, logits: Tensor, sequences: list[Sequence], rows: list[int]) -> None:
        self._take_all(sequences, self._next_tokens(sequences, _rows_of(logits, rows)))

    def _next_tokens(self, sequences: list[Sequence], logits: Tensor) -> list[int]:
        if not sequences:
            return []
        with self._model_runs():  # on a GPU this is where its forward is waited for
            return choosing.choose([sequence.state for sequence in sequences], logits)

    def _take_all(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """Give each sequence its next token; hand over those that end."""
        now = time.monotonic()
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            if not sequence.row.dropped:
                sequence.tokens.append(token_id)
                self._take(sequence, token_id, now)

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

    def _count_step(self, batch: Batch, attention_calls: int) -> None:
        stats = self.stats
        stats.steps += 1
        stats.decode_steps += bool(batch.decode)
        if batch.decode and not self._scheduler.waiting:
            stats.steps_below_8 += len(self._scheduler.running) < _FEW
        stats.attention_calls += attention_calls
        stats.graphs_recorded, stats.graph_steps = self._recorded.captured, self._recorded.replayed
        stats.graphs_refused, stats.graph_padding_rows = self._recorded.refused, self._recorded.padding_rows

    def _count_tokens(self, batch: Batch) -> None:
        runs = [(chunk.target, chunk.first, len(chunk.tokens)) for chunk in batch.chunks]
        # The last token of a prompt, too, may be computed as one that decodes.
        runs += [(s, s.computed - 1, 1) for s in batch.decode if s.computed <= s.prompt_length]
        for target, first, tokens in runs:
            if isinstance(target, prefix.Node):
                self.stats.prefill_tokens_computed += tokens
            else:
                self.stats.prefill_tokens_computed += target.prefilled(first, tokens)
                self.stats.tokens_recomputed += target.recomputed(first, tokens)


def _rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    return logits[torch.tensor(rows, dtype=torch.long, device=logits.device)]


def _prompt_logits(sequences: list[Sequence]) -> Tensor:
    """Return the logits [S, V] after prompts that are prefixes."""
    return torch.stack([s.node.logits for s in sequences if s.node.logits is not None])
