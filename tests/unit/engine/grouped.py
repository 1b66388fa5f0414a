"""Random weights of integers in groups, and models that have them."""

import torch
from torch import Tensor, nn

from worker.engine.quantize import weights
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.weights import Bits, GroupedWeight


def random_weight(
    outputs: int,
    inputs: int,
    bits: Bits = 4,
    group: int = 32,
    minimum: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.float32,
) -> GroupedWeight:
    """Return a weight whose every integer, scale and offset is drawn, the same at every call."""
    generator = torch.Generator().manual_seed(outputs * 7919 + inputs)
    high = 2**bits
    integers = torch.randint(high, (outputs, inputs), generator=generator)
    shape = (outputs, inputs // group)
    scales = (0.5 + torch.rand(shape, generator=generator)) / high
    offsets = torch.rand(shape, generator=generator) * (-1 if minimum else high)
    order = torch.randperm(inputs, generator=generator) if ordered else None
    return GroupedWeight(
        weights.pack(integers, bits), scales.to(dtype), offsets.to(dtype), group, bits, minimum, order
    )


def nearest(weight: Tensor, bits: Bits = 4, group: int = 32) -> GroupedWeight:
    """Return a weight [outputs, inputs] rounded to the nearest integers between each group's extremes."""
    grouped = weight.float().unflatten(1, (-1, group))
    low, high = grouped.amin(2), grouped.amax(2)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-9)
    integers = ((grouped - low[..., None]) / scales[..., None]).round().clamp(0, 2**bits - 1)
    return GroupedWeight(weights.pack(integers.flatten(1), bits), scales, low, group, bits, minimum=True)


def quantize(model: nn.Module, bits: Bits = 4, group: int = 32) -> nn.Module:
    """Replace the linear layers of a model's decoder layers whose inputs are whole groups."""
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and ".layers." in f".{name}" and linear.in_features % group == 0:
            weight = linear.weight.data
            rounded = IntLinear(nearest(weight, bits, group), linear.bias, weight.dtype)
            model.set_submodule(name, rounded)
    return model


def dequantize(model: nn.Module) -> nn.Module:
    """Replace the layers of integers by linear layers that have the same weights."""
    for name, rounded in list(model.named_modules()):
        if isinstance(rounded, IntLinear):
            dtype = rounded.weight.dtype
            linear = nn.Linear(
                rounded.in_features, rounded.out_features, rounded.bias is not None, dtype=dtype
            )
            linear.weight.data = rounded.integers.dequantized(dtype)
            if rounded.bias is not None:
                linear.bias.data = rounded.bias
            model.set_submodule(name, linear)
    return model
