"""A linear layer whose weight is integers in groups."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker.engine.quantize.weights import GroupedWeight

# Most weights that are numbers at once: those of a large head would take gigabytes.
AT_A_TIME = 1 << 25


class IntLinear(nn.Module):
    """A linear layer x [..., inputs] -> [..., outputs], called as nn.Linear is, in plain torch.

    It runs everywhere and always in the same way, and is what faster ways are compared with: see `packed`.
    With `exact`, no way that rounds by the number of rows takes its place.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        grouped: GroupedWeight,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        exact: bool = False,
    ) -> None:
        """Take a weight, a bias [outputs], and the dtype of what goes in."""
        super().__init__()
        self.grouped = grouped
        self.in_features, self.out_features = grouped.inputs, grouped.outputs
        self.exact = exact
        # Models read the dtype and device of a layer's weight; one that reads the numbers fails.
        self.register_buffer("weight", torch.empty(0, dtype=dtype, device=grouped.packed.device), False)
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype), False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.grouped
        rows = max(1, AT_A_TIME // weight.inputs)
        if weight.outputs <= rows:
            return F.linear(x, weight.dequantized(x.dtype), self.bias)
        y = x.new_empty(*x.shape[:-1], weight.outputs)
        for start in range(0, weight.outputs, rows):
            part = slice(start, start + rows)
            bias = None if self.bias is None else self.bias[part]
            y[..., part] = F.linear(x, weight.rows(part).dequantized(x.dtype), bias)
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow the module to another device; a dtype is that of what goes in, and integers stay."""
        super()._apply(fn, recurse)
        self.grouped = self.grouped.to(self.weight.device)
        return self

    def extra_repr(self) -> str:
        weight = self.grouped
        return f"{self.in_features}, {self.out_features}, bits={weight.bits}, group={weight.group}"


def can_join(linears: Sequence[IntLinear]) -> bool:
    """Tell whether layers have inputs in one order, and one format."""
    first = linears[0].grouped
    return all(_alike(first, linear.grouped) for linear in linears[1:])


def _alike(a: GroupedWeight, b: GroupedWeight) -> bool:
    if (a.inputs, a.group, a.bits, a.minimum) != (b.inputs, b.group, b.bits, b.minimum):
        return False
    if (a.scales.dtype, a.offsets.dtype) != (b.scales.dtype, b.offsets.dtype):
        return False
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)


def join(linears: Sequence[IntLinear]) -> IntLinear:
    """Return a layer with the outputs of several that `can_join`, one behind another."""
    first = linears[0]
    if len(linears) == 1:
        return first
    weights = [linear.grouped for linear in linears]
    joined = dataclasses.replace(
        weights[0],
        packed=torch.cat([weight.packed for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        offsets=torch.cat([weight.offsets for weight in weights]),
    )
    exact = any(linear.exact for linear in linears)
    return IntLinear(joined, _joined_bias(linears), first.weight.dtype, exact)


def _joined_bias(linears: Sequence[IntLinear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
            for linear in linears
        ]
    )
