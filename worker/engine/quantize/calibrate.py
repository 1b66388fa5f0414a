"""Rounding that knows what goes into a layer: each input's error is made up for by the inputs behind it."""

import torch
from torch import Tensor

from worker.engine.quantize import rounding
from worker.engine.quantize.weights import Bits, GroupedWeight

_DAMPING = 0.01


def second_moments(x: Tensor) -> Tensor:
    """Return the mean of x_i x_j [inputs, inputs] float32 over the rows of x [..., inputs]."""
    rows = x.flatten(0, -2).float()
    return rows.T @ rows / max(1, rows.shape[0])


def compensation(moments: Tensor) -> Tensor:
    """Return the upper Cholesky factor [inputs, inputs] of the inverse of damped second moments: how errors
    are made up for, whatever the weight.
    """
    damped = moments.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1  # never anything but 0 goes in
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)


def calibrated(weight: Tensor, factor: Tensor, bits: Bits, group: int) -> GroupedWeight:
    """Round a weight [outputs, inputs] so that its outputs, more than its numbers, stay what they were.

    Method: GPTQ (Frantar et al. 2023) in the inputs' own order, by the `compensation` factor; a group's scale
    and minimum are searched when its turn comes, an input's error weighted by what it costs to make up for.
    """
    left = weight.float().T.contiguous()  # [inputs, outputs]: an input's weights lie together
    parts = []
    for start in range(0, left.shape[0], group):
        end = start + group
        values, own = left[start:end], factor[start:end, start:end]
        importance = own.diagonal().square().reciprocal()
        scale, minimum = rounding.searched_grid(values.T, importance, bits)
        errors = _compensated(values, own, scale[:, 0], minimum[:, 0], bits)
        left[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
        parts.append((scale, minimum))
    scales, minima = (torch.stack(each, 1) for each in zip(*parts, strict=True))
    return rounding.grouped_weight(left.T.unflatten(1, (-1, group)), scales, minima, bits)


def _compensated(values: Tensor, factor: Tensor, scale: Tensor, minimum: Tensor, bits: Bits) -> Tensor:
    """Set a group's values [group, outputs] to what they are rounded to; return the errors left to others."""
    errors = torch.empty_like(values)
    steps = factor.diagonal().tolist()
    for i, value in enumerate(values):
        kept = rounding.rounded(value, scale, minimum, bits).mul_(scale).add_(minimum)
        error = torch.sub(value, kept, out=errors[i]).div_(steps[i])
        values[i + 1 :].addr_(factor[i, i + 1 :], error, alpha=-1)
        value.copy_(kept)
    return errors
