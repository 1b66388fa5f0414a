"""What a decoder layer does between its matrix products, each in one function that a compiler makes one
kernel of.

Half precision goes in and comes out; in between everything is float32, and rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.engine import precision


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return RMSNorm (Zhang & Sennrich 2019) of x [T, D]; `weight` [D] is wide."""
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, epsilon).to(x.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Return heads [T, H, D], normed by themselves if there is a `weight` [H, D], wide, then rotated.

    `cos` and `sin` [T, D / 2] turn elements i and i + D / 2 (RoPE, Su et al. 2021).
    """
    x = heads.to(precision.wide(heads.dtype))
    if weight is not None:
        x = F.rms_norm(x, x.shape[-1:], eps=epsilon) * weight
    cos, sin = cos[:, None], sin[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(heads.dtype)


def gate(x: Tensor) -> Tensor:
    """Return silu of the first half of x [T, 2 D] times the second [T, D]."""
    a, b = x.to(precision.wide(x.dtype)).chunk(2, -1)
    return (F.silu(a) * b).to(x.dtype)


@dataclass(frozen=True)
class Pointwise:
    """These functions, as they are or compiled."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = norm
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor] = rotate
    gate: Callable[[Tensor], Tensor] = gate


PLAIN = Pointwise()
