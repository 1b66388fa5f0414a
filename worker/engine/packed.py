"""Matrix products with weights laid out once for the CPU, and elementwise work done in the product.

Three ways, the first that a weight allows: our own kernels; oneDNN's packed fp32 products, twice as fast at
decode batch sizes as what `F.linear` does with the weight as it is (the ops are what torch's inductor
compiles to; they are private); and plain torch, the twin of both.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from worker.engine.native import library
from worker.engine.native.library import Kernels, pointer

# Weights packed for this many rows are the fastest, or as fast as any, at 1 to 512 rows.
_ROWS_HINT = 64
_PLAIN, _ADD, _SILU_GATE = 0, 1, 2
Replaced = tuple[nn.Module, str, nn.Module]
"""The parent of a module, its name there, and what was there before."""
_Product = library.structure(
    "Product", "x x_row rows inputs outputs weight bias scale summand y y_row ending"
)


class PackedLinear(nn.Module):
    """A linear layer x [..., inputs] -> [..., outputs]; it can scale rows before and add to them after."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take a weight [outputs, inputs] and a bias [outputs]."""
        super().__init__()
        self.bias = None if bias is None else bias.contiguous()
        self.outputs = weight.shape[0]
        # Models read the dtype and device of a layer's weight; one that reads the numbers fails, in the
        # trial.
        self.weight = weight.new_empty(0)
        self._kernels = library.kernels(weight.dtype, weight.device)
        self._onednn = self._kernels is None and _onednn_packs(weight)
        if self._kernels is not None:
            self._weight = _panels(self._kernels, weight)
        elif self._onednn:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        else:
            self._weight = weight

    @property
    def addresses(self) -> tuple[int, int]:
        """Return where the panels of the weight lie, and the bias (0: none)."""
        return self._weight.data_ptr(), pointer(self.bias)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return linear(x); with `scale` [T], of x [T, inputs] times the scale of each row."""
        if self._kernels is not None:
            return _product(self._kernels, x, self._weight, self.bias, self.outputs, _PLAIN, scale)
        if scale is not None:
            x = x * scale[:, None]
        if not self._onednn or x.numel() == 0:
            return F.linear(x, self._weight, self.bias) if not self._onednn else self._empty(x)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        """Return linear(x) + summand."""
        if self._kernels is not None:
            return _product(self._kernels, x, self._weight, self.bias, self.outputs, _ADD, summand=summand)
        return self._combined(x, summand, "add") if self._onednn else self(x) + summand

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return linear(x) * factor."""
        return self._combined(x, factor, "mul") if self._onednn else self(x) * factor

    def _combined(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self.bias, operation)

    def _empty(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.outputs)


class PackedGate(nn.Module):
    """silu(gate(x)) * up(x) of x [T, inputs] times `scale` [T], in one product where our kernels run."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, norm: Tensor) -> None:
        """Take two linear layers, and the factors [inputs] of what goes into them."""
        super().__init__()
        weights = [gate.weight.data * norm, up.weight.data * norm]
        self._kernels = library.kernels(weights[0].dtype, weights[0].device)
        if self._kernels is None:
            self._gate, self._up = (
                PackedLinear(weight, None if linear.bias is None else linear.bias.data)
                for weight, linear in zip(weights, (gate, up), strict=True)
            )
            return
        self.outputs, inputs = weights[0].shape
        count = self._kernels.panels(self.outputs)
        self._weight = weights[0].new_empty(2 * count, inputs, self._kernels.width)
        for first, weight in enumerate(weights):
            self._kernels.pack(weight, self._weight, first, every=2)
        self._bias = _woven(self._kernels, [gate.bias, up.bias], self.outputs)

    @property
    def addresses(self) -> tuple[int, int]:
        """Return where the panels of gate and up lie, and their biases (0: none)."""
        return self._weight.data_ptr(), pointer(self._bias)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self._kernels is None:
            return self._up.times(x * scale[:, None], F.silu(self._gate(x, scale)))
        return _product(self._kernels, x, self._weight, self._bias, self.outputs, _SILU_GATE, scale)


def _product(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outputs: int,
    ending: int,
    scale: Tensor | None = None,
    summand: Tensor | None = None,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if rows.dtype != kernels.dtype or rows.shape[1] != weight.shape[1]:
        raise NotImplementedError(f"a product of {tuple(x.shape)} {x.dtype}")
    y = x.new_empty(*x.shape[:-1], outputs)
    if summand is not None:
        summand = summand.expand_as(y).contiguous()
    task = _Product(
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        outputs,
        weight.data_ptr(),
        pointer(bias),
        pointer(scale),
        pointer(summand),
        y.data_ptr(),
        outputs,
        ending,
    )
    if rows.shape[0]:
        kernels.product(ctypes.byref(task), torch.get_num_threads())
    return y


def _panels(kernels: Kernels, weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    panels = weight.new_empty(kernels.panels(outputs), inputs, kernels.width)
    kernels.pack(weight, panels)
    return panels


def _woven(kernels: Kernels, biases: list[Any], outputs: int) -> Tensor | None:
    """Return the biases of gate and up in the order of their panels; zeros where only one has them."""
    known = [bias for bias in biases if bias is not None]
    if not known:
        return None
    padded = known[0].new_zeros(kernels.panels(outputs), 2, kernels.width)
    for i, bias in enumerate(biases):
        if bias is not None:
            flat = F.pad(bias.data, (0, padded.shape[0] * kernels.width - outputs))
            padded[:, i] = flat.view(-1, kernels.width)
    return padded.flatten()


def _onednn_packs(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    )


def can_pack(weight: Tensor) -> bool:
    """Tell whether products with a weight have a packed form."""
    return _onednn_packs(weight) or library.kernels(weight.dtype, weight.device) is not None


def pack_all(model: nn.Module) -> Iterator[Replaced]:
    """Replace the linear layers of a model; yield what was there."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            packed = _packed(layer)
            if packed is not None:
                setattr(parent, name, packed)
                yield parent, name, layer


def is_plain(layer: Any) -> bool:
    """Tell whether a module is a linear layer and nothing else. Subclasses may do anything in their forward,
    and hooks around it, as those of tensor parallelism do.
    """
    return type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)


def _packed(layer: Any) -> PackedLinear | None:
    if is_plain(layer) and can_pack(layer.weight):
        return PackedLinear(layer.weight.data, None if layer.bias is None else layer.bias.data)
    if type(layer) is Conv1D and can_pack(layer.weight):
        return PackedLinear(layer.weight.data.T, layer.bias.data)
    return None
