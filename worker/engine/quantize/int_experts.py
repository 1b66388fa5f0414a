"""A mixture's experts with weights of integers, or that are read when they are wanted."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker.engine.quantize import experts, mixing
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.tensors import Tensors


def _is_recorded(x: Tensor) -> bool:
    """Tell whether a graph is being recorded, in which the host must not wait."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class IntExperts(nn.Module):
    """A mixture's experts [tokens, hidden] -> [tokens, hidden], called as the model's own are.

    `own` says what is computed between an expert's two products; its weights are gone. Each expert that is
    chosen runs once over its tokens, which needs to know how many: on a GPU that waits for the router, but
    in what a graph records.
    """

    def __init__(self, own: Any, up: list[IntLinear], down: list[IntLinear]) -> None:
        super().__init__()
        self.own, self.up, self.down = own, nn.ModuleList(up), nn.ModuleList(down)
        for left in (f"{name}{end}" for name in mixing.parameters(own) for end in ("", "_bias")):
            if hasattr(own, left):
                delattr(own, left)
        if experts.is_hollow(own):
            del own.on_disk

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        mixed_by = mixing.mix_unseen if _is_recorded(hidden_states) else mixing.mix
        return mixed_by(self.own, self._expert, hidden_states, top_k_index, top_k_weights)

    def _expert(self, number: int, x: Tensor) -> Tensor:
        made: Tensor = self.down[number](mixing.between(self.own, self.up[number](x)))
        return made


class ReadExperts(nn.Module):
    """A mixture's experts that read their weights each time."""

    def __init__(self, own: Any, tensors: Tensors, model: Any) -> None:
        super().__init__()
        self.own, self._tensors, self._model = own, tensors, [model]  # a list: it is no part of this one

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own, model = self.own, self._model[0]
        first, second = mixing.parameters(own)
        up, down = (experts.read(own, name, self._tensors, model) for name in (first, second))

        def expert(number: int, x: Tensor) -> Tensor:
            made = F.linear(x, up[number].to(x.dtype), experts.bias(own, first, number))
            return F.linear(
                mixing.between(own, made), down[number].to(x.dtype), experts.bias(own, second, number)
            )

        return mixing.mix(own, expert, hidden_states, top_k_index, top_k_weights)
