"""Matrix products with weights laid out once for the CPU's kernels, and elementwise work done in the product.

At decode batch sizes oneDNN multiplies a packed fp32 weight about twice as fast as `F.linear` does its own.
The ops are what torch's inductor compiles to; they are private, so everything here has a twin in plain torch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

# Weights packed for this many rows are the fastest, or as fast as any, at 1 to 512 rows.
_ROWS_HINT = 64
Replaced = tuple[nn.Module, str, nn.Module]
"""The parent of a module, its name there, and what was there before."""


class PackedLinear(nn.Module):
    """A linear layer x [..., inputs] -> [..., outputs] that can also end in an activation, a product or a
    sum.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take a weight [outputs, inputs] and a bias [outputs]."""
        super().__init__()
        self.packs = can_pack(weight)
        self.bias = bias
        self.outputs = weight.shape[0]
        # Models read the dtype and device of a layer's weight; one that reads the numbers fails, in the
        # trial.
        self.weight = weight.new_empty(0)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT) if self.packs else weight
        )

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        """Return silu(linear(x))."""
        return self._product(x, "swish") if self.packs else F.silu(self._product(x, "none"))

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return linear(x) * factor."""
        return self._combined(x, factor, "mul") if self.packs else self._product(x, "none") * factor

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        """Return linear(x) + summand."""
        return self._combined(x, summand, "add") if self.packs else self._product(x, "none") + summand

    def _product(self, x: Tensor, activation: str) -> Tensor:
        if not self.packs:
            return F.linear(x, self._weight, self.bias)
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.outputs)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, activation, [], "")

    def _combined(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self.bias, operation)


def can_pack(weight: Tensor) -> bool:
    """Tell whether products with a weight have the packed form."""
    return (
        weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    )


def pack_all(model: nn.Module) -> Iterator[Replaced]:
    """Replace the linear layers of a model; yield what was there."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            packed = _packed(layer)
            if packed is not None:
                setattr(parent, name, packed)
                yield parent, name, layer


def _packed(layer: Any) -> PackedLinear | None:
    # Subclasses may do anything in their forward.
    if type(layer) is nn.Linear and can_pack(layer.weight):
        return PackedLinear(layer.weight.data, None if layer.bias is None else layer.bias.data)
    if type(layer) is Conv1D and can_pack(layer.weight):
        return PackedLinear(layer.weight.data.T, layer.bias.data)
    return None
