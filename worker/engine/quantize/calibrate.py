"""Rounding that knows what goes into a layer: each input's error is made up for by the inputs behind it."""

from functools import cached_property

import torch
from torch import Tensor

from worker.engine.quantize import rounding
from worker.engine.quantize.weights import Bits, GroupedWeight

_DAMPING = 0.1


class Inputs:
    """What is known of the rows x [..., inputs] that go into a product."""

    def __init__(self, x: Tensor) -> None:
        self._rows = x.flatten(0, -2).float()

    @cached_property
    def importance(self) -> Tensor:
        """How much an error of each input's weights [inputs] matters by itself: its mean square."""
        squares = self._rows.square().mean(0)
        return squares + 1e-6 * squares.mean() + 1e-12  # so that no group is without any

    @cached_property
    def compensation(self) -> Tensor:
        """The upper Cholesky factor [inputs, inputs] of the inverse of damped second moments: how errors are
        made up for.
        """
        moments = self._rows.T @ self._rows / len(self._rows)
        moments.diagonal().add_(_DAMPING * moments.diagonal().mean() + 1e-12)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
        return torch.linalg.cholesky(inverse, upper=True)


def calibrated(weight: Tensor, inputs: Inputs, bits: Bits, group: int) -> GroupedWeight:
    """Round a weight [outputs, inputs] so that its outputs, more than its numbers, stay what they were.

    Method: GPTQ (Frantar et al. 2023) in the inputs' own order, with scales and minima of the weights as they
    were: those of weights that make up for others' errors turned out worse (docs/quantization.md).
    """
    grouped = weight.float().unflatten(1, (-1, group))
    scales, minima = rounding.searched_grid(grouped, inputs.importance.unflatten(0, (-1, group)), bits)
    left = weight.float().T.contiguous()  # [inputs, outputs]: an input's weights lie together
    for number, start in enumerate(range(0, left.shape[0], group)):
        end = start + group
        own = inputs.compensation[start:end]
        scale, minimum = scales[:, number, 0], minima[:, number, 0]
        errors = _compensated(left[start:end], own[:, start:end], scale, minimum, bits)
        left[end:].addmm_(own[:, end:].T, errors, alpha=-1)
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
