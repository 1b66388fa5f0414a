"""A matrix of small unsigned integers, each group of which has a scale and an offset of its own."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Bits = Literal[4, 8]


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight [outputs, inputs]: `group` inputs in a row share a scale, and a zero point or a minimum.

    `packed` [outputs, inputs * bits / 8] uint8 has the integers of an output in the order of the inputs, of
    4 bits the even one low. `scales` and `offsets` [outputs, inputs / group] are float16, bfloat16 or
    float32. An integer q stands for (q - offset) * scale; with `minimum` for q * scale + offset: as a format
    has it, so that nothing is rounded. `order` [inputs] int64: input i of the integers is input order[i] of
    the layer.
    """

    packed: Tensor
    scales: Tensor
    offsets: Tensor
    group: int
    bits: Bits = 4
    minimum: bool = False
    order: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.packed.shape[0]

    @property
    def inputs(self) -> int:
        return self.packed.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        order = 0 if self.order is None else self.order.nbytes
        return self.packed.nbytes + self.scales.nbytes + self.offsets.nbytes + order

    def to(self, device: torch.device) -> "GroupedWeight":
        """Return the same weight on a device."""
        order = None if self.order is None else self.order.to(device)
        packed, scales, offsets = self.packed.to(device), self.scales.to(device), self.offsets.to(device)
        return replace(self, packed=packed, scales=scales, offsets=offsets, order=order)

    def rows(self, part: slice) -> "GroupedWeight":
        """Return the weight of some outputs, which shares its numbers."""
        return replace(self, packed=self.packed[part], scales=self.scales[part], offsets=self.offsets[part])

    def integers(self) -> Tensor:
        """Return the integers [outputs, inputs] uint8."""
        if self.bits == 8:
            return self.packed
        return torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [outputs, inputs], computed in float32, inputs in the order of the layer."""
        grouped = self.integers().unflatten(1, (-1, self.group)).float()
        scales, offsets = self.scales.float()[..., None], self.offsets.float()[..., None]
        values = grouped * scales + offsets if self.minimum else (grouped - offsets) * scales
        weight = values.flatten(1)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order, weight)
        return weight.to(dtype)


def pack(integers: Tensor, bits: Bits) -> Tensor:
    """Return integers [outputs, inputs] as `GroupedWeight.packed` has them."""
    integers = integers.to(torch.uint8)
    return integers if bits == 8 else integers[:, ::2] | integers[:, 1::2] << 4
