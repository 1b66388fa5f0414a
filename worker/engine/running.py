"""One batch inside `generate`: each row keeps its own parameters, and is handed over when it ends."""

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

from worker.engine import padding, sampling, stop
from worker.engine.loader import Loaded
from worker.engine.types import Completion, FinishReason, Row, Stats, Timings

# Below this, dividing by the temperature overflows; the result would be greedy anyhow.
_GREEDY_TEMPERATURE = 1e-5


class Batch:
    """Runs `rows` to their end. `hand_over` is called with each row as it finishes."""

    def __init__(
        self,
        loaded: Loaded,
        rows: list[Row],
        stats: Stats,
        hand_over: Callable[[Row, Completion], None],
        closing: threading.Event,
    ) -> None:
        self.rows = rows
        self._loaded = loaded
        self._stats = stats
        self._hand_over = hand_over
        self._closing = closing
        self._states = [_RowState(row, loaded) for row in rows]

    @property
    def unfinished(self) -> list[Row]:
        return [state.row for state in self._states if not state.done]

    def run(self) -> Exception | None:
        """Generate until every row has ended; return what `generate` raised, without its memory."""
        for row in self.rows:
            row.token_ids.clear()
        inputs = padding.padded([row.request.prompt_ids for row in self.rows], self._loaded)
        prompt_tokens = sum(row.prompt_tokens for row in self.rows)
        self._stats.batches += 1
        self._stats.prefill_tokens_computed += prompt_tokens
        self._stats.padding_tokens += inputs["input_ids"].numel() - prompt_tokens
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(row.max_tokens for row in self.rows),
            pad_token_id=self._loaded.pad_id,
            use_cache=True,
        )
        try:
            self._loaded.model.generate(
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList([_Choose(self._states, inputs["input_ids"].shape[1])]),
                stopping_criteria=StoppingCriteriaList([_Advance(self)]),
            )
        except Exception as error:  # a model may raise anything: the caller decides what becomes of the rows
            # The frames of the traceback hold the tensors of the batch.
            return error.with_traceback(None)
        return None

    def advance(self, token_ids: list[int]) -> list[bool]:
        """Give each row its next token; return which rows have ended."""
        now = time.monotonic()
        self._stats.decode_steps += 1
        for state, token_id in zip(self._states, token_ids, strict=True):
            if state.done:
                continue
            if state.row.dropped or self._closing.is_set():
                state.done = True
                continue
            self._stats.tokens_sampled += 1
            completion = state.take(token_id, now)
            if completion is not None:
                state.done = True
                self._hand_over(state.row, completion)
        return [state.done for state in self._states]


class _RowState:
    def __init__(self, row: Row, loaded: Loaded) -> None:
        self.row = row
        self.done = False
        self.broken = False
        self._tokenizer = loaded.tokenizer
        wanted = row.request.sampling
        # A special token given as a stop string never shows in the text: it stops by its id.
        special = {text: id for text, id in loaded.tokenizer.get_added_vocab().items() if text in wanted.stop}
        eos_ids = frozenset() if wanted.ignore_eos else loaded.eos_ids
        self.end_ids = eos_ids | frozenset(special.values())
        texts = tuple(text for text in wanted.stop if text not in special)
        self._matcher = stop.StopMatcher(self._decode, texts, wanted.min_tokens)

    @property
    def may_end(self) -> bool:
        """Whether the token about to be chosen may be one that ends the row."""
        return len(self.row.token_ids) + 1 >= self.row.request.sampling.min_tokens

    def take(self, token_id: int, now: float) -> Completion | None:
        row = self.row
        if self.broken:
            return self._completion("error", "", now, "the model's logits are not finite numbers")
        row.token_ids.append(token_id)
        if row.first_token is None:
            row.first_token = now
        if token_id in self.end_ids:
            return self._completion("stop", self._decode(row.token_ids[:-1]), now)
        before = self._matcher.text_before_stop(row.token_ids)
        if before is not None:
            return self._completion("stop", before, now)
        if len(row.token_ids) >= row.max_tokens:
            return self._completion("length", self._decode(row.token_ids), now)
        return None

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _completion(
        self, reason: FinishReason, text: str, now: float, error: str | None = None
    ) -> Completion:
        row = self.row
        timings = Timings(row.admitted, row.first_token, now)
        return Completion(row.id, list(row.token_ids), text, reason, 0, timings, error)


class _Choose(LogitsProcessor):
    """Leaves greedy rows as they are; of a sampled row only the drawn token stays, for argmax to take."""

    def __init__(self, states: list[_RowState], prompt_length: int) -> None:
        self._states = states
        self._prompt_length = prompt_length
        self._sampled = [
            index
            for index, state in enumerate(states)
            if state.row.request.sampling.temperature >= _GREEDY_TEMPERATURE
        ]
        self._parameters: sampling.Parameters | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self._prompt_length
        finite = torch.isfinite(scores.amax(dim=-1)).tolist()
        for index, state in enumerate(self._states):
            state.broken = not finite[index]
            if state.end_ids and not state.may_end:
                scores[index, sorted(state.end_ids)] = -torch.inf
        rows = [index for index in self._sampled if finite[index]]
        if rows:
            drawn = sampling.draw(scores[rows], self._parameters_of(rows, scores.device), position)
            scores[rows] = -torch.inf
            scores[rows, drawn] = 0.0
        return scores

    def _parameters_of(self, rows: list[int], device: torch.device) -> sampling.Parameters:
        if self._parameters is None or len(rows) != len(self._parameters.seeds):
            chosen = [self._states[index].row.request.sampling for index in rows]
            self._parameters = sampling.Parameters.of(chosen, device)
        return self._parameters


class _Advance(StoppingCriteria):
    """Hands the new tokens to the batch after each step."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = self._batch.advance(input_ids[:, -1].tolist())
        return torch.tensor(done, device=input_ids.device)
