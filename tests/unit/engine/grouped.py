"""Random weights of integers in groups, and models that have them."""

import copy
from typing import Any

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


def nearest(weight: Tensor, bits: Bits = 4, group: int = 32, ordered: bool = False) -> GroupedWeight:
    """Return a weight [outputs, inputs] rounded to the nearest integers between each group's extremes."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3)) if ordered else None
    grouped = (weight if order is None else weight[:, order]).float().unflatten(1, (-1, group))
    low, high = grouped.amin(2), grouped.amax(2)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-9)
    integers = ((grouped - low[..., None]) / scales[..., None]).round().clamp(0, 2**bits - 1)
    packed = weights.pack(integers.flatten(1), bits)
    return GroupedWeight(packed, scales, low, group, bits, minimum=True, order=order)


def quantize(
    model: Any, bits: Bits = 4, group: int = 32, ordered: bool = False, but: tuple[str, ...] = ()
) -> Any:
    """Replace the linear layers of a model's decoder layers, but those of some names."""
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and "layers." in name and not name.endswith(but or "-"):
            weight = nearest(linear.weight.data, bits, group, ordered)
            bias = None if linear.bias is None else linear.bias.data
            model.set_submodule(name, IntLinear(weight, bias, linear.weight.dtype))
    return model


def dequantized(model: Any) -> Any:
    """Return a copy of a model in float64 whose layers of integers are linear layers of the same weights."""
    model = copy.deepcopy(model).double()
    for name, rounded in list(model.named_modules()):
        if isinstance(rounded, IntLinear):
            biased = rounded.bias is not None
            linear = nn.Linear(rounded.in_features, rounded.out_features, biased, dtype=torch.float64)
            linear.weight.data = rounded.grouped.dequantized(torch.float64)
            if rounded.bias is not None:
                linear.bias.data = rounded.bias
            model.set_submodule(name, linear)
    return model
