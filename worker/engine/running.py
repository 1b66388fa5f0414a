"""One batch inside `generate`: every row has its own parameters, and is handed over when it ends."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from worker.engine import batching, padding, sampling
from worker.engine.loader import Loaded
from worker.engine.rows import RowState
from worker.engine.types import Completion, Row, Stats

log = logging.getLogger(__name__)
# Below this, dividing by the temperature overflows; the result would be greedy anyhow.
_GREEDY_TEMPERATURE = 1e-5


class Batch:
    """Runs rows until all have ended or the batch has grown to its limits.

    `hand_over` is called with each row as it ends. Rows that were begun before go on where they were.
    """

    def __init__(
        self,
        loaded: Loaded,
        states: list[RowState],
        limits: batching.Limits,
        stats: Stats,
        hand_over: Callable[[Row, Completion], None],
        closing: threading.Event,
    ) -> None:
        self._loaded = loaded
        self._states = states
        self._limits = limits
        self._stats = stats
        self._hand_over = hand_over
        self._closing = closing
        self._length = 0
        self._steps = 0

    def run(self) -> Exception | None:
        """Generate; return what it raised, freed of the tensors of the batch. Some rows may not be done."""
        rows = [state.row for state in self._states]
        inputs = padding.padded([row.request.prompt_ids + row.token_ids for row in rows], self._loaded)
        self._length = inputs["input_ids"].shape[1]
        tokens = sum(row.tokens for row in rows)
        self._stats.batches += 1
        self._stats.prefill_tokens_computed += tokens
        self._stats.padding_tokens += len(rows) * self._length - tokens
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(row.tokens_left for row in rows),
            pad_token_id=self._loaded.pad_id,
            use_cache=True,
        )
        try:
            self._loaded.model.generate(
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList([_Choose(self._states)]),
                stopping_criteria=StoppingCriteriaList([_Advance(self)]),
            )
        except Exception as error:  # a model may raise anything: the caller decides what becomes of the rows
            log.warning("generate raised rows=%d length=%d", len(rows), self._length, exc_info=True)
            return error.with_traceback(None)
        return None if self._steps else RuntimeError("generate ended before the first token")

    def advance(self, token_ids: list[int]) -> list[bool]:
        """Give each row its next token; return which rows need no more of them."""
        now = time.monotonic()
        self._stats.decode_steps += 1
        self._steps += 1
        self._length += 1
        for state, token_id in zip(self._states, token_ids, strict=True):
            if state.row.dropped or self._closing.is_set():
                state.done = True
            if state.done:
                continue
            self._stats.tokens_sampled += 1
            completion = state.take(token_id, now)
            if completion is not None:
                state.done = True
                self._hand_over(state.row, completion)
        if self._limits.reached(len(self._states), self._length):
            return [True] * len(self._states)
        return [state.done for state in self._states]


class _Choose(LogitsProcessor):
    """Leaves greedy rows as they are; of a sampled row only the drawn token stays, for argmax to take."""

    def __init__(self, states: list[RowState]) -> None:
        self._states = states
        self._rows: list[int] = []
        self._parameters = sampling.Parameters.of([], "cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        finite = torch.isfinite(scores.amax(dim=-1)).tolist()
        rows = []
        for index, state in enumerate(self._states):
            state.broken = not finite[index]
            if state.end_ids and not state.may_end:
                scores[index, sorted(state.end_ids)] = -torch.inf
            sampled = state.row.request.sampling.temperature >= _GREEDY_TEMPERATURE
            if sampled and finite[index] and not state.done:
                rows.append(index)
        if rows:
            positions = [len(self._states[index].row.token_ids) for index in rows]
            drawn = sampling.draw(scores[rows], self._parameters_of(rows, scores.device), positions)
            scores[rows] = -torch.inf
            scores[rows, drawn] = 0.0
        return scores

    def _parameters_of(self, rows: list[int], device: torch.device) -> sampling.Parameters:
        if rows != self._rows:
            self._rows = rows
            wanted = [self._states[index].row.request.sampling for index in rows]
            self._parameters = sampling.Parameters.of(wanted, device)
        return self._parameters


class _Advance(StoppingCriteria):
    """Hands the new tokens to the batch after each step."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = self._batch.advance(input_ids[:, -1].tolist())
        return torch.tensor(done, device=input_ids.device)
