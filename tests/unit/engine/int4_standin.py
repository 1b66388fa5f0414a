"""What torch's products with integers of 4 bits do on a GPU, on the CPU and from their definition.

`convert`: dword j of lane l of tile (n, k) holds 8 half bytes of output 8 n + l / 4. From byte
16 (4 k + j) + l % 4 of it on, every fourth one gives its upper half to the low half of the dword, and its
lower half to the high one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def convert(weight: Tensor, inner: int) -> Tensor:
    """Return the tiles of a weight [outputs, inputs / 2] uint8 whose even inputs are the upper halves."""
    assert (weight.dtype, weight.is_contiguous(), inner) == (torch.uint8, True, 8)
    outputs, size = weight.shape
    assert outputs % 8 == 0
    assert size % 64 == 0
    tiles = torch.zeros(outputs // 8, size // 64, 32, 4, dtype=torch.int64)
    for lane in range(32):
        for j in range(4):
            for i in range(4):
                at = 16 * j + lane % 4 + 4 * i
                halves = weight[lane // 4 :: 8, at::64].long()  # [outputs / 8, size / 64]
                tiles[:, :, lane, j] |= (halves >> 4) << 4 * i | (halves & 15) << 16 + 4 * i
    return torch.where(tiles >= 2**31, tiles - 2**32, tiles).int()


def multiply(x: Tensor, tiles: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """Return x [M, inputs] times the weight (q - 8) * scale + zero of tiles."""
    assert (x.dtype, x.is_contiguous(), tiles.dtype) == (torch.bfloat16, True, torch.int32)
    assert (scales_and_zeros.dtype, group in (32, 64, 128, 256)) == (torch.bfloat16, True)
    outputs, size = tiles.shape[0] * 8, tiles.shape[1] * 64
    assert scales_and_zeros.shape == (2 * size // group, outputs, 2)
    integers = torch.zeros(outputs, 2 * size)
    for lane in range(32):
        for j in range(4):
            for i in range(4):
                byte = 16 * j + lane % 4 + 4 * i
                for odd in (0, 1):
                    halves = tiles[:, :, lane, j].long() >> 16 * odd + 4 * i & 15
                    integers[lane // 4 :: 8, 2 * byte + odd :: 128] = halves.float()
    scales, zeros = scales_and_zeros.float().transpose(0, 1)[..., None].unbind(2)
    weight = (integers.unflatten(1, (-1, group)) - 8) * scales + zeros
    return (x.float() @ weight.flatten(1).T).bfloat16()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let torch's operations for GPUs take tensors of the CPU inside."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_convert_weight_to_int4pack", convert, "CPU")
    library.impl("_weight_int4pack_mm", multiply, "CPU")
    try:
        yield
    finally:
        library._destroy()
