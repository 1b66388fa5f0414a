"""Products with integers of 4 bits on a GPU: torch's own for few rows, cuBLAS's of dequantised ones for many.

torch's product has an integer stand for (q - 8) * scale + zero, in bfloat16, and wants the integers in tiles
as tensor cores take them in. Nothing here synchronises, so that graphs can record it.
"""

import functools
import logging

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.weights import GroupedWeight

log = logging.getLogger(__name__)
_GROUPS = (32, 64, 128, 256)
_INNER = 8
_TILE_INPUTS, _TILE_OUTPUTS = 16 * _INNER, 8
# Above so many rows a product is bound by arithmetic, in which cuBLAS is the better one.
_FEW_ROWS = 64


def takes(linear: IntLinear) -> bool:
    """Tell whether torch's product takes a layer where it is."""
    weight = linear.grouped
    fits = weight.inputs % _TILE_INPUTS == 0 and weight.outputs % _TILE_OUTPUTS == 0
    known = weight.bits == 4 and weight.group in _GROUPS and linear.weight.dtype == torch.bfloat16
    return fits and known and not linear.exact and _serves(weight.packed.device)


@functools.cache
def _serves(device: torch.device) -> bool:
    """Tell whether a GPU has the product, and it is what it is taken for; says why not, once."""
    if device.type != "cuda":
        return False
    try:
        fault = _fault(device)
    except RuntimeError as error:
        fault = str(error).split("\n")[0]
    if fault is not None:
        log.warning("no product of 4 bits on this GPU: integers are dequantised", extra={"reason": fault})
    return fault is None


@torch.inference_mode()
def _fault(device: torch.device) -> str | None:
    """Compare one small product with its definition."""
    outputs, inputs, group = 2 * _TILE_OUTPUTS, 2 * _TILE_INPUTS, 64
    numbers = torch.arange(outputs * inputs // 2, device=device)
    packed = (numbers * 37 % 251).to(torch.uint8).view(outputs, -1)
    scales = (1 + torch.arange(outputs * inputs // group, device=device)).view(outputs, -1) / 256
    weight = GroupedWeight(packed, scales, scales * -5, group, minimum=True)
    x = torch.eye(inputs, dtype=torch.bfloat16, device=device)
    tiled = TiledLinear(weight)
    if not torch.equal(untiled(tiled.tiles), weight.integers()):
        return "its tiles have another layout"
    gap = (tiled.product(x).T.float() - weight.dequantized()).abs().max()
    return None if gap <= 0.01 * weight.dequantized().abs().max() else f"products are off by {float(gap):.2g}"


class TiledLinear(nn.Module):
    """A linear layer x [..., inputs] -> [..., outputs] in bfloat16 on a GPU.

    It is `second_best` where Marlin, which is installed, ought to run and does not.
    """

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None, second_best: bool = False) -> None:
        super().__init__()
        self.second_best = second_best
        self.bias, self._order, self._group = bias, weight.order, weight.group
        self.weight = weight.packed.new_empty(0, dtype=torch.bfloat16)
        swapped = weight.packed << 4 | weight.packed >> 4  # the op has the even input high
        self.tiles = torch.ops.aten._convert_weight_to_int4pack(swapped.contiguous(), _INNER)
        self.scales_and_zeros = scales_and_zeros(weight)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._order is not None:
            rows = rows.index_select(1, self._order)
        if 0 < rows.shape[0] <= _FEW_ROWS:
            y = self.product(rows.contiguous())
            y = y if self.bias is None else y + self.bias
        else:
            y = F.linear(rows, self.dequantized(), self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def product(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(rows, self.tiles, self._group, self.scales_and_zeros)

    def dequantized(self) -> Tensor:
        """Return the weight [outputs, inputs] that torch's product multiplies with."""
        return dequantized(untiled(self.tiles), self.scales_and_zeros, self._group)


def scales_and_zeros(weight: GroupedWeight) -> Tensor:
    """Return [groups, outputs, 2] bfloat16: by what q - 8 is multiplied, and what is added then."""
    scales, offsets = weight.scales.float(), weight.offsets.float()
    zeros = offsets + 8 * scales if weight.minimum else (8 - offsets) * scales
    return torch.stack((scales.T, zeros.T), -1).bfloat16().contiguous()


def dequantized(integers: Tensor, scales_and_zeros: Tensor, group: int) -> Tensor:
    """Return (q - 8) * scale + zero [outputs, inputs] bfloat16, rounded once."""
    scales, zeros = scales_and_zeros.transpose(0, 1)[..., None].unbind(2)  # [outputs, groups, 1]
    signed = integers.view(torch.int8).sub(8).unflatten(1, (-1, group)).bfloat16()
    return torch.addcmul(zeros, signed, scales, out=signed).flatten(1)


def untiled(tiles: Tensor) -> Tensor:
    """Return the integers [outputs, inputs] uint8 of tiles [outputs / 8, inputs / 128, 32, 4] int32.

    Of a tile's 32 lanes 4 have an output. A dword has 4 pairs of inputs that lie 8 inputs apart: the even
    ones in its lower half, the odd ones in the upper.
    """
    down, across = tiles.shape[:2]
    parts = tiles.contiguous().view(torch.uint8).view(down, across, 8, 4, 4, 2, 2)
    halves = torch.stack((parts & 15, parts >> 4), -1)  # [down, across, output, lane, dword, odd, pair, pair]
    return halves.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(down * 8, across * _TILE_INPUTS)
