"""Steps of a batch: packed, computed, and the next tokens chosen, read now or a step later."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from worker.engine import ahead, backoff, choosing, graphs, packing, pages, prefix, runner
from worker.engine.paged_step import PagedStep
from worker.engine.scheduler import Batch, Scheduler
from worker.engine.sequence import Sequence
from worker.engine.speculation import Speculation
from worker.engine.types import EngineConfig, Stats

_FEW = 8
_OUT_OF_MEMORY = "out of memory: there is none left to compute even one token of it at a time"


class Stepper:
    """Runs what the scheduler plans.

    `take(sequence, token, now)` is called with each next token, `fail(sequence, reason)` with who cannot run.
    `model_seconds` were not spent on scheduling.
    """

    def __init__(
        self,
        model: runner.Runner,
        config: EngineConfig,
        scheduler: Scheduler,
        speculation: Speculation,
        stats: Stats,
        recorded: graphs.Counts,
        take: Callable[[Sequence, int, float], None],
        fail: Callable[[Sequence, str], None],
    ) -> None:
        self.pack = model.packer(scheduler.memory, config.cascade)
        self.model_seconds = 0.0
        self.flight: ahead.Flight | None = None
        self.model = model
        self._scheduler = scheduler
        self.speculation = speculation
        self._stats = stats
        self._recorded = recorded
        self._take = take
        self._fail = fail
        self._runs_ahead = config.run_ahead and model.device.ahead and scheduler.memory.paged

    def advance(self) -> bool:
        """Run the next step; False when there is nothing to compute, or to read."""
        if self.flight is not None and not self._can_stay_ahead():
            self.settle()
        self._continue_from(self._ready_prompts())
        settled = self.flight is None
        batch = self._scheduler.next_batch()
        if batch is None:
            self.settle()
            return not settled
        if self._scheduler.limits.drafts:
            batch = self.speculation.extend(batch, self._scheduler.running)
        self._run(batch)
        return True

    def _can_stay_ahead(self) -> bool:
        """Tell whether the next step can be chosen and computed while tokens are unread."""
        running = self._scheduler.running
        return not (
            self.speculation.drafts_among(len(running))
            or self._ready_prompts()
            # Else whoever is preempted would have to know all its tokens.
            or not isinstance(self._scheduler.memory, pages.Memory)
            or ahead.needed_pages(running) > self._scheduler.memory.free_pages
            or any(map(ahead.waits_for_host, running))
        )

    def settle(self) -> None:
        """Read the tokens that are on their way, and be ahead no more."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self._read(flight)

    def _read(self, flight: ahead.Flight) -> None:
        with self._model_runs():
            ids = flight.wait()
        now = time.monotonic()
        for sequence, token_id in flight.tokens(ids):
            self._take(sequence, token_id, now)

    def _run(self, batch: Batch) -> None:
        last = self.flight
        computed = backoff.tried(lambda: self._compute(batch, last))
        if computed is None:
            self._back_off(batch)
            return
        packed, logits, sequences, chosen = computed
        self._scheduler.limits.grow()
        self._count_tokens(batch)
        if not isinstance(chosen, list):
            self.flight = chosen
            if last is not None:
                self._stats.steps_ahead += 1
                self._read(last)
            return
        assert last is None
        self._take_all(sequences, chosen)
        if len(sequences) < len(logits):
            self.speculation.accept(packed.drafted, functools.partial(self._choose_from, logits))
            self._continue_from(self._ready_prompts())

    def _compute(
        self, batch: Batch, last: ahead.Flight | None
    ) -> tuple[packing.Packed, Tensor, list[Sequence], list[int] | ahead.Flight | None]:
        """Compute a step and choose tokens; return who is to take them, and the tokens, maybe unread. What it
        raises leaves all as it was, once the batch is taken back.
        """
        packed = self.pack(batch)
        if last is not None:
            assert isinstance(packed.step, PagedStep)
            ahead.carry(last, batch.decode, packed.step, self.model.device)
        with self._model_runs():
            logits = self.model.step(packed.step)
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
        was_ahead = self.flight is not None
        self.settle()  # whose token it was may have ended
        tokens = sum(len(chunk.tokens) for chunk in batch.chunks)
        if not (self._shrink(tokens, len(batch.decode), bool(batch.drafts)) or was_ahead):
            self._fail(backoff.alone(batch, self._scheduler), _OUT_OF_MEMORY)

    def _shrink(self, tokens: int, rows: int, drafts: bool = False) -> bool:
        """Have less in the next steps than one that was out of memory had; False when nothing is less."""
        self._stats.out_of_memory_splits += 1
        limits = self._scheduler.limits
        if limits.shrink(tokens, rows, drafts) or self.speculation.stop():
            return True
        limits.relax()  # what ends now may have been the cause
        return False

    def _launch(self, sequences: list[Sequence], rows: list[int], logits: Tensor) -> ahead.Flight | None:
        """Choose tokens on the device and leave them unread."""
        device = self.model.device
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
        self.model_seconds += time.perf_counter() - started

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

    def _count_step(self, batch: Batch, attention_calls: int) -> None:
        stats = self._stats
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
                self._stats.prefill_tokens_computed += tokens
            else:
                self._stats.prefill_tokens_computed += target.prefilled(first, tokens)
                self._stats.tokens_recomputed += target.recomputed(first, tokens)


def _rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    return logits[torch.tensor(rows, dtype=torch.long, device=logits.device)]


def _prompt_logits(sequences: list[Sequence]) -> Tensor:
    """Return the logits [S, V] after prompts that are prefixes."""
    return torch.stack([s.node.logits for s in sequences if s.node.logits is not None])
