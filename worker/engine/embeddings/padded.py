"""Embeds padded batches with a model as transformers runs it: encoders, and whatever else is not causal or
bypasses our attention.
"""

import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from worker.engine import heads, loader, packed, padding
from worker.engine.embeddings.headless import NO_LIMIT, ModelEncoder, hidden_states, without_head
from worker.engine.embeddings.pooling import Pooling

log = logging.getLogger(__name__)
_TRIAL_LENGTHS = (2, 5, 11)
# Of the largest hidden state.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.15


class PaddedEncoder(ModelEncoder):
    """Texts filled on the right to one length, where that changes none; else in batches of one length."""

    def __init__(self, loaded: loader.Loaded, how: Pooling) -> None:
        """Try which batches give texts what they get alone. Raises what a single text raises."""
        super().__init__(how)
        self._loaded = loaded
        self._base = without_head(loaded.model)
        # No token of a causal model sees what is on its right. A mask may even harm: in some code a token of
        # the padding that sees nothing at all gets NaN for its attention.
        causal = heads.is_causal(loaded.model.config)
        self._masks = not causal and padding.takes_mask(self._base)
        self._options = {"use_cache": False} if _takes(self._base, "use_cache") else {}
        self._fill = _fill_id(loaded)
        kind, reason = self._try_batches()
        self.pads = kind is padding.Batches.PADDED
        self.one_length = not self.pads
        self.most_texts = 1 if kind is padding.Batches.ONE_ROW else NO_LIMIT
        if not self.pads:
            log.warning("each embedding batch will have %s: %s", kind, reason)

    @staticmethod
    @torch.inference_mode()
    def pack(loaded: loader.Loaded) -> bool:
        """Replace a model's products by packed ones; False: hidden states would change, all is as it was."""
        base, replaced = without_head(loaded.model), []
        ids = torch.tensor([_prompt(max(_TRIAL_LENGTHS), loaded)], device=loaded.device)
        before = hidden_states(base, input_ids=ids)
        try:
            for each in packed.pack_all(base):
                replaced.append(each)
            gap = _gap(hidden_states(base, input_ids=ids), before)
            reason = f"hidden states are off by {gap:.2g} of the largest"
            if gap <= _tolerance(loaded):
                return bool(replaced)
        except Exception as error:  # code of a model may read the weights of its layers
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
        log.info("products of the model's own code stay", extra={"reason": reason})
        for parent, name, module in reversed(replaced):
            setattr(parent, name, module)
        return False

    def _hidden(self, texts: list[list[int]]) -> list[Tensor]:
        hidden = self._run(texts)
        return [row[: len(text)] for row, text in zip(hidden, texts, strict=True)]

    def _run(self, texts: list[list[int]]) -> Tensor:
        length = max(map(len, texts))
        ids = [text + [self._fill] * (length - len(text)) for text in texts]
        inputs = {"input_ids": torch.tensor(ids, device=self._loaded.device)}
        if self._masks:
            mask = [[1] * len(text) + [0] * (length - len(text)) for text in texts]
            inputs["attention_mask"] = torch.tensor(mask, device=self._loaded.device)
        return hidden_states(self._base, **inputs, **self._options)

    @torch.inference_mode()
    def _try_batches(self) -> tuple[padding.Batches, str]:
        ragged = [_prompt(length, self._loaded) for length in _TRIAL_LENGTHS]
        reason = self._unlike(ragged)
        if padding.rope_depends_on_length(self._loaded.model.config):
            reason = "the rotary embedding depends on the longest row"
        if reason is None:
            return padding.Batches.PADDED, ""
        length = max(_TRIAL_LENGTHS)
        even = [[id, *_prompt(length, self._loaded)[1:]] for id in range(len(_TRIAL_LENGTHS))]
        worse = self._unlike(even)
        if worse is None:
            return padding.Batches.ONE_LENGTH, reason
        return padding.Batches.ONE_ROW, worse

    def _unlike(self, texts: list[list[int]]) -> str | None:
        """Return in words how a batch differs from each of its texts alone, or None."""
        alone = [self._run([text])[0] for text in texts]
        try:
            together = self._hidden(texts)
        except Exception as error:  # whatever a batch raises, single texts run
            return f"a batch raises {type(error).__name__}: {error}".split("\n")[0]
        gap = max(_gap(a, b) for a, b in zip(together, alone, strict=True))
        if gap <= _tolerance(self._loaded):
            return None
        return f"hidden states in a batch are off by {gap:.2g} of the largest"


def _gap(found: Tensor, expected: Tensor) -> float:
    """Return how far hidden states are off, in parts of the largest; not a number: infinitely."""
    return float(((found - expected).abs().max() / expected.abs().max()).nan_to_num(torch.inf))


def _tolerance(loaded: loader.Loaded) -> float:
    return _TOLERANCE.get(loaded.model.dtype, _HALF_TOLERANCE)


def _prompt(length: int, loaded: loader.Loaded) -> list[int]:
    return [(7 * position + 11 * length) % loaded.vocabulary for position in range(length)]


def _fill_id(loaded: loader.Loaded) -> int:
    """Return what fills rows: some models count their positions over what is not this."""
    own = getattr(loaded.model.config.get_text_config(), "pad_token_id", None)
    return own if isinstance(own, int) and 0 <= own < loaded.vocabulary else loaded.pad_id


def _takes(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters
