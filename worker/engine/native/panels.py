"""Weights as the compiled products read them: in panels of outputs that lie side by side."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.engine.native import library
from worker.engine.native.library import Kernels, pointer
from worker.engine.quantize.weights import GroupedWeight

AnyWeight = Tensor | GroupedWeight
Weight = library.structure("Weight", "data bias bits scales offsets kind group minimum order factors")
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def takes(weight: GroupedWeight) -> bool:
    """Tell whether the kernels can read integers; others are what no known format has."""
    groups = weight.group == weight.inputs or weight.group * weight.bits % 32 == 0
    return groups and weight.scales.dtype == weight.offsets.dtype and weight.scales.dtype in _KINDS


class Panels:
    """A weight [outputs, inputs] and its bias, or several of one shape whose panels take turns.

    What goes in is multiplied by `factors` [inputs]: in the weight, or before it if that is integers.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[AnyWeight],
        biases: Sequence[Tensor | None],
        factors: Tensor | None = None,
    ) -> None:
        first = weights[0]
        self.outputs, self.inputs = (
            first.shape if isinstance(first, Tensor) else (first.outputs, first.inputs)
        )
        self._width = kernels.width
        self._scales: Tensor | None = None
        self._offsets: Tensor | None = None
        self._order: Tensor | None = None
        self._factors: Tensor | None = None
        self._format = (0, 0, 0, 0)
        self._bias = self._woven_biases(biases)
        if isinstance(first, Tensor):
            self._set_numbers(kernels, [weight for weight in weights if isinstance(weight, Tensor)], factors)
        else:
            self._set_integers([weight for weight in weights if isinstance(weight, GroupedWeight)], factors)

    def _set_numbers(self, kernels: Kernels, weights: list[Tensor], factors: Tensor | None) -> None:
        every = len(weights)
        shape = (every * kernels.panels(self.outputs), self.inputs, self._width)
        self._data = weights[0].new_empty(shape)
        for first, weight in enumerate(weights):
            kernels.pack(weight if factors is None else weight * factors, self._data, first, every)

    def _set_integers(self, weights: list[GroupedWeight], factors: Tensor | None) -> None:
        first = weights[0]
        self._order = None if first.order is None else first.order.contiguous()
        if factors is not None and self._order is not None:
            factors = factors[self._order]
        self._factors = None if factors is None else factors.contiguous()
        self._data = self._woven([_words(weight) for weight in weights])
        self._scales = self._woven([weight.scales for weight in weights])
        self._offsets = self._woven([weight.offsets for weight in weights])
        self._format = (first.bits, _KINDS[first.scales.dtype], first.group, int(first.minimum))

    def _woven_biases(self, biases: Sequence[Tensor | None]) -> Tensor | None:
        known = next((bias for bias in biases if bias is not None), None)
        if known is None:
            return None
        zeros = torch.zeros_like(known)
        return self._woven([(zeros if bias is None else bias)[:, None] for bias in biases])

    def _woven(self, parts: list[Tensor]) -> Tensor:
        """Return parts [outputs, n] as panels [panels, n, width] that take turns, the last ones padded."""
        padding = -self.outputs % self._width
        padded = [F.pad(part, (0, 0, 0, padding)).unflatten(0, (-1, self._width)) for part in parts]
        return torch.stack(padded, 1).flatten(0, 1).transpose(1, 2).contiguous()

    def structure(self) -> ctypes.Structure:
        """Return the weight as C has it: addresses, good as long as this object is."""
        bits, kind, group, minimum = self._format
        return Weight(
            self._data.data_ptr(),
            pointer(self._bias),
            bits,
            pointer(self._scales),
            pointer(self._offsets),
            kind,
            group,
            minimum,
            pointer(self._order),
            pointer(self._factors),
        )


def _words(weight: GroupedWeight) -> Tensor:
    """Return integers as the dwords that lie together in a panel."""
    padded = F.pad(weight.packed, (0, -weight.packed.shape[1] % 4))
    return padded.contiguous().view(torch.int32)
