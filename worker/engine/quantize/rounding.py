"""Weights to integers without data: to the nearest, and with scales and minima that err least."""

import torch
from torch import Tensor

from worker.engine.quantize.weights import Bits, GroupedWeight, pack

_SMALLEST = 2.0**-24  # of float16
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_REFINEMENTS = 2
_AT_ONCE = 1 << 16
"""Numbers that are searched together: what stays in a core's cache is several times as fast."""


def nearest(weight: Tensor, bits: Bits, group: int) -> GroupedWeight:
    """Round a weight [outputs, inputs] to the nearest of 2^bits steps between a group's ends."""
    grouped = weight.float().unflatten(1, (-1, group))
    return grouped_weight(grouped, *grid(grouped, bits), bits)


def searched(weight: Tensor, importance: Tensor, bits: Bits, group: int) -> GroupedWeight:
    """Round a weight [outputs, inputs] by the scales and minima with the least error, an input's weighted by
    its importance [inputs].
    """
    grouped = weight.float().unflatten(1, (-1, group))
    return grouped_weight(grouped, *searched_grid(grouped, importance.unflatten(0, (-1, group)), bits), bits)


def grid(values: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Return scale and minimum [..., 1] between which the values [..., group] lie, as float16 has them."""
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    return _storable((high - low) / _most(bits), low)


def searched_grid(values: Tensor, importance: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Return the scale and minimum [outputs, groups, 1] of each group with the least squared error.

    The error of a value [outputs, groups, group] counts by its importance [groups, group].
    """
    rows = max(1, _AT_ONCE // importance.numel())
    found = [_searched(part, importance, bits) for part in values.split(rows)]
    scales, minima = zip(*found, strict=True)
    return torch.cat(scales), torch.cat(minima)


def _searched(values: Tensor, importance: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Try ranges of several widths; to the integers of each, fit scale and minimum by least squares."""
    scale, minimum = grid(values, bits)
    error = _error(values, importance, scale, minimum, bits)
    whole, center = scale, minimum + scale * (_most(bits) / 2)
    for shrink in _SHRINKS:
        tried = whole * shrink, center - whole * shrink * (_most(bits) / 2)
        for _ in range(_REFINEMENTS):
            tried = _fitted(values, importance, *tried, bits)
            found = _error(values, importance, *tried, bits)
            better = found < error
            error = torch.where(better, found, error)
            scale, minimum = torch.where(better, tried[0], scale), torch.where(better, tried[1], minimum)
    return scale, minimum


def rounded(values: Tensor, scale: Tensor, minimum: Tensor, bits: Bits) -> Tensor:
    """Return the nearest integers, as floats."""
    return ((values - minimum) / scale).round_().clamp_(0, _most(bits))


def refuse_infinite(name: str, weight: GroupedWeight) -> None:
    """Raise ValueError for a weight made of numbers that are not finite, or that float16 does not hold."""
    if not (weight.scales.isfinite().all() and weight.offsets.isfinite().all()):
        raise ValueError(f"{name} has weights that are not finite, or too large to be rounded")


def grouped_weight(values: Tensor, scale: Tensor, minimum: Tensor, bits: Bits) -> GroupedWeight:
    """Round values [outputs, groups, group] by scales and minima [outputs, groups, 1]."""
    integers = rounded(values, scale, minimum, bits).flatten(1)
    scales, minima = scale[..., 0].half().contiguous(), minimum[..., 0].half().contiguous()
    return GroupedWeight(pack(integers, bits), scales, minima, values.shape[-1], bits, minimum=True)


def _fitted(
    values: Tensor, importance: Tensor, scale: Tensor, minimum: Tensor, bits: Bits
) -> tuple[Tensor, Tensor]:
    """Return the scale and minimum that fit the values best once they are rounded by the given ones."""
    integers = rounded(values, scale, minimum, bits)
    total = importance.sum(-1, keepdim=True)
    mean_integer = (importance * integers).sum(-1, keepdim=True) / total
    mean_value = (importance * values).sum(-1, keepdim=True) / total
    away = importance * (integers - mean_integer)
    spread = (away * integers).sum(-1, keepdim=True)
    slope = (away * values).sum(-1, keepdim=True) / spread
    fitted = torch.where((spread > 0) & (slope > 0), slope, scale)
    return _storable(fitted, mean_value - fitted * mean_integer)


def _error(values: Tensor, importance: Tensor, scale: Tensor, minimum: Tensor, bits: Bits) -> Tensor:
    found = rounded(values, scale, minimum, bits) * scale + minimum
    return (importance * (found - values).square_()).sum(-1, keepdim=True)


def _storable(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Round to what float16 holds: integers are chosen for the numbers that are kept."""
    return scale.half().float().clamp_(min=_SMALLEST), minimum.half().float()


def _most(bits: Bits) -> int:
    return 2**bits - 1
