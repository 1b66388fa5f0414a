"""Matrix products with weights laid out once for the CPU, and elementwise work done in the product.

Three ways, the first that a weight allows: our own kernels, also for integers; oneDNN's packed fp32 products,
twice as fast at decode batch sizes as what `F.linear` does with the weight as it is (the ops are what torch's
inductor compiles to; they are private); and plain torch, the twin of both.
"""

import ctypes
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from worker.engine.native import library, panels
from worker.engine.native.library import Kernels, pointer
from worker.engine.native.panels import AnyWeight, Panels
from worker.engine.quantize import marlin, tiles
from worker.engine.quantize.linear import IntLinear

log = logging.getLogger(__name__)
# Weights packed for this many rows are the fastest, or as fast as any, at 1 to 512 rows.
_ROWS_HINT = 64
_PLAIN, _ADD, _SILU_GATE = 0, 1, 2
Replaced = tuple[nn.Module, str, nn.Module]
"""The parent of a module, its name there, and what was there before."""
_Product = library.structure(
    "Product", "x x_row rows inputs outputs scale summand y y_row ending", weight=panels.Weight
)


class PackedLinear(nn.Module):
    """A linear layer x [..., inputs] -> [..., outputs]; it can scale rows before and add to them after."""

    panels: Panels

    def __init__(self, weight: AnyWeight, bias: Tensor | None = None, factors: Tensor | None = None) -> None:
        """Take a weight [outputs, inputs], a bias [outputs], and factors [inputs] of what goes in."""
        super().__init__()
        self._kernels = _kernels_for(weight)
        self._onednn = False
        if self._kernels is not None:
            self.panels = Panels(self._kernels, [weight], [bias], factors)
            self.outputs = self.panels.outputs
            self.weight = torch.empty(0, dtype=self._kernels.dtype)
            return
        assert isinstance(weight, Tensor), "integers without kernels"
        if factors is not None:
            weight = weight * factors
        self.bias = None if bias is None else bias.contiguous()
        self.outputs = weight.shape[0]
        # Models read the dtype and device of a layer's weight; one that reads the numbers fails, in the
        # trial.
        self.weight = weight.new_empty(0)
        self._onednn = _onednn_packs(weight)
        if self._onednn:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        else:
            self._weight = weight

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return linear(x); with `scale` [T], of x [T, inputs] times the scale of each row."""
        if self._kernels is not None:
            return _product(self._kernels, x, self.panels, _PLAIN, scale)
        if scale is not None:
            x = x * scale[:, None]
        if not self._onednn or x.numel() == 0:
            return F.linear(x, self._weight, self.bias) if not self._onednn else self._empty(x)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        """Return linear(x) + summand."""
        if self._kernels is not None:
            return _product(self._kernels, x, self.panels, _ADD, summand=summand)
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

    panels: Panels

    def __init__(self, gate: nn.Module, up: nn.Module, norm: Tensor) -> None:
        """Take two linear layers, and the factors [inputs] of what goes into them."""
        super().__init__()
        (weight, bias), (up_weight, up_bias) = content(gate), content(up)
        self._kernels = _kernels_for(weight)
        if self._kernels is None:
            self._gate, self._up = PackedLinear(weight, bias, norm), PackedLinear(up_weight, up_bias, norm)
        else:
            self.panels = Panels(self._kernels, [weight, up_weight], [bias, up_bias], norm)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self._kernels is None:
            return self._up.times(x * scale[:, None], F.silu(self._gate(x, scale)))
        return _product(self._kernels, x, self.panels, _SILU_GATE, scale)


def _product(
    kernels: Kernels,
    x: Tensor,
    weight: Panels,
    ending: int,
    scale: Tensor | None = None,
    summand: Tensor | None = None,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if rows.dtype != kernels.dtype or rows.shape[1] != weight.inputs:
        raise NotImplementedError(f"a product of {tuple(x.shape)} {x.dtype}")
    y = x.new_empty(*x.shape[:-1], weight.outputs)
    if summand is not None:
        summand = summand.expand_as(y).contiguous()
    task = _Product(
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        weight.outputs,
        pointer(scale),
        pointer(summand),
        y.data_ptr(),
        weight.outputs,
        ending,
        weight.structure(),
    )
    if rows.shape[0]:
        kernels.product(ctypes.byref(task), torch.get_num_threads())
    return y


def _kernels_for(weight: AnyWeight) -> Kernels | None:
    """Return the kernels that take a weight; integers are for products in float32."""
    if isinstance(weight, Tensor):
        return library.kernels(weight.dtype, weight.device)
    return library.kernels(torch.float32, weight.packed.device) if panels.takes(weight) else None


def content(linear: Any) -> tuple[AnyWeight, Tensor | None]:
    """Return the weight of a linear layer, numbers or integers, and its bias."""
    weight = linear.grouped if isinstance(linear, IntLinear) else linear.weight.data
    return weight, None if linear.bias is None else linear.bias.data


def _onednn_packs(weight: Tensor) -> bool:
    return (
        weight.dtype == torch.float32 and weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    )


def can_pack(linear: Any) -> bool:
    """Tell whether products with the weight of a linear layer have a packed form."""
    if isinstance(linear, IntLinear):
        return linear.weight.dtype == torch.float32 and _kernels_for(linear.grouped) is not None
    return _onednn_packs(linear.weight) or _kernels_for(linear.weight) is not None


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
    return type(layer) in (nn.Linear, IntLinear) and not (layer._forward_hooks or layer._forward_pre_hooks)


def _packed(layer: Any) -> nn.Module | None:
    if type(layer) is IntLinear:
        faster = fastest(layer) if is_plain(layer) else layer
        return None if faster is layer else faster
    if is_plain(layer) and can_pack(layer):
        return PackedLinear(*content(layer))
    if type(layer) is Conv1D and can_pack(layer):
        return PackedLinear(layer.weight.data.T, layer.bias.data)
    return None


def fastest(layer: IntLinear) -> nn.Module:
    """Return the fastest form of a layer of integers where it is, which may be itself."""
    if can_pack(layer):
        return PackedLinear(*content(layer))
    if marlin.takes(layer):
        return marlin.MarlinLinear(layer.grouped, layer.bias, layer.weight.dtype)
    if tiles.takes(layer):
        return tiles.TiledLinear(layer.grouped, layer.bias, second_best=marlin.fails(layer))
    return layer


def pack_integers(model: nn.Module) -> Iterator[Replaced]:
    """Replace a model's layers of integers by their fastest form; yield what was there."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is IntLinear and (faster := _packed(layer)) is not None:
                setattr(parent, name, faster)
                yield parent, name, layer


def count_plain_integers(model: nn.Module) -> int:
    """Return how many products dequantise their weight each time, or take Marlin's place; says so."""
    plain = [layer for layer in model.modules() if isinstance(layer, IntLinear)]
    if plain:
        extra = {"count": len(plain), "first": str(plain[0])}
        log.warning("products that dequantise their weight each time", extra=extra)
    second = sum(getattr(layer, "second_best", False) for layer in model.modules())
    if second:
        log.warning("products of torch in the place of Marlin's", extra={"count": second})
    return len(plain) + second
