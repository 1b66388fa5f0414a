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

from worker.engine import batching, choosing, padding
from worker.engine.loader import Loaded
from worker.engine.rows import RowState
from worker.engine.types import Completion, Row, Stats

log = logging.getLogger(__name__)


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
        for row in rows:
            row.padding_tokens = (row.padding_tokens or 0) + self._length - row.tokens
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(row.tokens_left for row in rows),
            pad_token_id=self._loaded.pad_id,
            use_cache=True,
        )
        for state in self._states:
            state.prepare()
        try:
            self._score_prompts()
            self._loaded.model.generate(
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList([_Choose(self._states)]),
                stopping_criteria=StoppingCriteriaList([_Advance(self)]),
            )
        except Exception as error:  # a model may raise anything: the caller decides what becomes of the rows
            log.warning("generate raised", extra={"rows": len(rows), "length": self._length}, exc_info=True)
            return error.with_traceback(None)
        return None if self._steps else RuntimeError("generate ended before the first token")

    @torch.inference_mode()
    def _score_prompts(self) -> None:
        """Run each prompt whose log probabilities are wanted: `generate` keeps the last logits only."""
        for state in self._states:
            if state.unscored:
                ids = torch.tensor([state.row.request.prompt_ids], device=self._loaded.device)
                state.score_prompt(0, self._loaded.model(input_ids=ids, use_cache=False).logits[0, :-1])

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
    """Chooses the next tokens and leaves only them, for argmax to take."""

    def __init__(self, states: list[RowState]) -> None:
        self._states = states

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = [index for index, state in enumerate(self._states) if not state.done]
        live = scores if len(rows) == len(self._states) else scores[rows]
        chosen = choosing.choose([self._states[index] for index in rows], live)
        scores.fill_(-torch.inf)
        scores[:, 0] = 0.0  # of rows that have ended
        for index, token_id in zip(rows, chosen, strict=True):
            scores[index, 0] = -torch.inf
            scores[index, token_id] = 0.0
        return scores


class _Advance(StoppingCriteria):
    """Hands the new tokens to the batch after each step."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = self._batch.advance(input_ids[:, -1].tolist())
        return torch.tensor(done, device=input_ids.device)
