"""Calibration without data: tokens that the model itself finds likely."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jobs import tokens
from worker.engine.quantize import experts, hollow, int_experts
from worker.engine.quantize.tensors import Tensors

_SEQUENCES, _LENGTH = 16, 128
_ROUNDS = 2
_SEED = 0


@torch.inference_mode()
def ids(model: Any, tensors: Tensors) -> Tensor:
    """Return token ids [sequences, tokens]: the same for the same model.

    Random tokens to begin with; then all tokens at once are drawn from what the model makes of those before
    them, a few times over (Jacobi iteration, as in Song et al. 2021). Each round reads every weight once,
    where writing text token by token would read all of them for each.
    """
    device = model.device
    chance = torch.Generator(device).manual_seed(_SEED)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    length = min(_LENGTH, tokens.context_of(model.config, None))
    made = torch.randint(vocabulary, (_SEQUENCES, length), generator=chance, device=device)
    head = model.get_output_embeddings()
    if head is None:
        return made
    with _read_when_called(model, tensors):
        for _ in range(_ROUNDS):
            hidden = model.base_model(input_ids=made, use_cache=False).last_hidden_state[:, :-1]
            for row, each in zip(made, hidden, strict=True):
                # In place: small results between them keep large chances' memory from being used again.
                row[1:] = torch.multinomial(head(each).float().softmax(-1), 1, generator=chance)[:, 0]
    return made


class _Reading(nn.Module):
    """A product that reads its weight each time."""

    def __init__(self, tensors: Tensors, name: str, layer: hollow.Hollow) -> None:
        super().__init__()
        self._tensors, self._name, self._layer = tensors, name, layer

    def forward(self, x: Tensor) -> Tensor:
        weight = hollow.read(self._tensors, self._name, self._layer)
        return F.linear(x, weight.to(x.device, x.dtype), self._layer.bias)


@contextmanager
def _read_when_called(model: Any, tensors: Tensors) -> Iterator[None]:
    empty: dict[str, Any] = {}
    empty |= {name: each for name, each in hollow.linears(model).items() if type(each) is hollow.Hollow}
    empty |= {name: each for name, each in experts.modules(model).items() if experts.is_hollow(each)}
    try:
        for name, each in empty.items():
            if type(each) is hollow.Hollow:
                hollow.put(model, name, _Reading(tensors, name, each))
            else:
                hollow.put(model, name, int_experts.ReadExperts(each, tensors, model))
        yield
    finally:
        for name, each in empty.items():
            hollow.put(model, name, each)
