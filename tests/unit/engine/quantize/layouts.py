"""Quantised weights packed word by word, as formats define it: nothing is shared with what reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Quantised:
    """Integers and zero points of a weight, its scales, and the group of each input."""

    integers: list[list[int]]  # [outputs][inputs]
    zeros: list[list[int]]  # [outputs][groups]
    scales: Tensor  # [outputs, groups]
    groups: list[int]  # [inputs]
    bits: int

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs] in float64, by the definition: (integer - zero) * scale."""
        integers, zeros = torch.tensor(self.integers).double(), torch.tensor(self.zeros).double()
        return (integers - zeros[:, self.groups]) * self.scales.double()[:, self.groups]


def made(
    outputs: int, inputs: int, bits: int, group: int, symmetric: bool, shuffled: bool = False, seed: int = 0
) -> Quantised:
    """Return a random weight; `shuffled` groups have inputs from anywhere."""
    chance = torch.Generator().manual_seed(seed)
    size = inputs if group == -1 else group
    count = inputs // size

    def integers(rows: int, columns: int, low: int = 0) -> list[list[int]]:
        return torch.randint(low, 2**bits, (rows, columns), generator=chance).tolist()

    zeros = [[2 ** (bits - 1)] * count] * outputs if symmetric else integers(outputs, count, 1)
    scales = (torch.rand(outputs, count, generator=chance) * 0.02 + 0.001).half()
    groups = [i // size for i in range(inputs)]
    if shuffled:
        groups = [groups[i] for i in torch.randperm(inputs, generator=chance).tolist()]
    return Quantised(integers(outputs, inputs), zeros, scales, groups, bits)


def word(fields: list[int], bits: int) -> int:
    """Return fields in one signed 32-bit integer, the first in the lowest bits."""
    value = sum(field << bits * i for i, field in enumerate(fields))
    return value - (1 << 32) if value >= 1 << 31 else value


def words(rows: list[list[int]], bits: int) -> Tensor:
    """Pack each row."""
    count = 32 // bits
    packed = [[word(row[i : i + count], bits) for i in range(0, len(row), count)] for row in rows]
    return torch.tensor(packed, dtype=torch.int32)


def transposed(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def gptq(weight: Quantised, v2: bool) -> dict[str, Tensor]:
    stored = [[zero - (0 if v2 else 1) for zero in row] for row in transposed(weight.zeros)]
    return {
        "qweight": words(weight.integers, weight.bits).T.contiguous(),
        "qzeros": words(stored, weight.bits),
        "scales": weight.scales.T.contiguous(),
        "g_idx": torch.tensor(weight.groups, dtype=torch.int32),
    }


def awq(weight: Quantised) -> dict[str, Tensor]:
    def interleaved(rows: list[list[int]]) -> list[list[int]]:
        return [[row[start + i] for start in range(0, len(row), 8) for i in AWQ_ORDER] for row in rows]

    return {
        "qweight": words(interleaved(transposed(weight.integers)), 4),
        "qzeros": words(interleaved(transposed(weight.zeros)), 4),
        "scales": weight.scales.T.contiguous(),
    }


def compressed(weight: Quantised, symmetric: bool, ordered: bool = False) -> dict[str, Tensor]:
    # Signed integers are stored plus 2^(bits - 1): those of ours that are not.
    parts = {
        "weight_packed": words(weight.integers, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor([len(weight.integers), len(weight.integers[0])]),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(transposed(weight.zeros), weight.bits).T.contiguous()
    if ordered:
        parts["weight_g_idx"] = torch.tensor(weight.groups, dtype=torch.int32)
    return parts
