"""Small integers in the fields of 32-bit ones, and what checkpoints say of them."""

import torch
from torch import Tensor

from worker.engine.quantize.weights import Bits

_GROUPS = (32, 64, 128, -1)


def split(words: Tensor, bits: Bits) -> Tensor:
    """Return the integers uint8 [rows, n * 32 / bits] of words [rows, n] int32, the lowest field first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (2**bits - 1)).flatten(1).to(torch.uint8)


def known_bits(bits: object) -> Bits:
    """Return how many bits; raises ValueError."""
    if bits == 4:
        return 4
    if bits == 8:
        return 8
    raise ValueError(f"weights of {bits} bits are not supported; those of 4 and 8 are")


def known_group(group: object) -> int:
    """Return the size of groups, -1 for a whole row; raises ValueError."""
    if not isinstance(group, int) or group not in _GROUPS:
        raise ValueError(
            f"groups of {group} are not supported; those of 32, 64, 128 and -1 (a whole row) are"
        )
    return group


def groups(inputs: int, group: int) -> int:
    """Return how many groups so many inputs make; raises ValueError."""
    if group == -1:
        return 1
    if inputs % group:
        raise ValueError(f"{inputs} inputs cannot be divided into groups of {group}")
    return inputs // group
