"""A model without its head: token ids in, hidden states after the final norm out, and vectors of these."""

import gc
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine import device_errors
from worker.engine.embeddings.pooling import Pooling

NO_LIMIT = 1 << 30


class Headless(nn.Module):
    """A model without its head: what it calls logits are its last hidden states [1, R, D]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base = without_head(model)

    def forward(self, logits_to_keep: Tensor | None = None, **inputs: Any) -> SimpleNamespace:
        hidden = hidden_states(self.base, **inputs)
        return SimpleNamespace(logits=hidden if logits_to_keep is None else hidden[:, logits_to_keep])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def without_head(model: Any) -> Any:
    """Return what of a model makes the hidden states: all of it when it has no head."""
    return model.base_model


def hidden_states(model: nn.Module, **inputs: Any) -> Tensor:
    """Run a model without its head; return its last hidden states [B, S, D], after the final norm."""
    output = model(**inputs)
    hidden = getattr(output, "last_hidden_state", None)
    return output[0] if hidden is None else hidden


class ModelEncoder:
    """What both kinds share: texts are encoded to lists of numbers, and errors told apart."""

    pads = False
    one_length = False
    most_texts = NO_LIMIT

    def __init__(self, how: Pooling) -> None:
        self._pooling = how

    def encode(self, texts: list[list[int]]) -> list[list[float]]:
        """See embedding.Encoder."""
        try:
            with torch.inference_mode():
                vectors: list[list[float]] = self._pooling(self._hidden(texts)).tolist()
                return vectors
        except Exception as error:
            if not device_errors.is_out_of_memory(error):
                raise
            line = str(error).split("\n")[0]
        gc.collect()  # outside of the handler, which holds the tensors of the batch
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise MemoryError(line)

    def is_lost(self, error: Exception) -> bool:
        """See embedding.Encoder."""
        return device_errors.is_lost(error)

    def _hidden(self, texts: list[list[int]]) -> list[Tensor]:
        """Return the hidden states of each text's tokens that the pooling looks at."""
        raise NotImplementedError
