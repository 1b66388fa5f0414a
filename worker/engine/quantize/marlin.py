"""Products with symmetric integers on a GPU by Marlin (Frantar et al. 2024), where gptqmodel is installed.

gptqmodel 7 compiles its kernels with nvcc when the first of them is wanted, once a machine, and changes
parts of safetensors and transformers when it is imported. So it is asked only for weights that Marlin takes
as they are: (q - 8) * scale of 4 bits, (q - 128) * scale of 8, in half precision. It pads what its tiles do
not divide in every product; such weights are left to others. Nothing here synchronises, so that graphs can
record it.
"""

import functools
import importlib
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.weights import Bits, GroupedWeight, pack

log = logging.getLogger(__name__)
_MODULE, _LAYER = "gptqmodel.nn_modules.qlinear.marlin", "MarlinLinear"
_GROUPS = (32, 64, 128)
_TILES = ((64, 128), (128, 64))
"""Its tiles have so many outputs and inputs, either way round."""
_HALF = (torch.float16, torch.bfloat16)


def takes(linear: IntLinear) -> bool:
    """Tell whether Marlin is there, and computes with the very numbers of a layer."""
    dtype = linear.weight.dtype
    return _fits(linear) and _serves(linear.weight.device, dtype, linear.grouped.bits)


def fails(linear: IntLinear) -> bool:
    """Tell whether Marlin is installed and ought to take a layer, but does not run, or errs."""
    return _fits(linear) and _is_installed() and not takes(linear)


def _fits(linear: IntLinear) -> bool:
    weight, dtype = linear.grouped, linear.weight.dtype
    if linear.exact or weight.minimum or dtype not in _HALF or not _is_gpu(linear.weight.device):
        return False
    grouped = weight.group in (*_GROUPS, weight.inputs)
    tiled = any(weight.outputs % down == 0 and weight.inputs % across == 0 for down, across in _TILES)
    return grouped and tiled and _is_symmetric(weight) and _holds(weight.scales, dtype)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _is_symmetric(weight: GroupedWeight) -> bool:
    return bool((weight.offsets == 2 ** (weight.bits - 1)).all())


def _holds(scales: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(scales.to(dtype).float(), scales.float())


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("gptqmodel") is not None


@functools.cache
def _serves(device: torch.device, dtype: torch.dtype, bits: Bits) -> bool:
    """Tell whether Marlin is there, and its product is what it is taken for; says why not, once."""
    if not _is_installed():
        return False
    try:
        log.info(
            "trying Marlin, whose kernels are compiled the first time", extra={"dtype": dtype, "bits": bits}
        )
        fault = _fault(device, dtype, bits)
    except Exception as error:  # it imports much, compiles, and may fail anywhere
        fault = f"{type(error).__name__}: {error}".split("\n")[0]
    if fault is not None:
        log.warning("no Marlin on this GPU: other products take its place", extra={"reason": fault})
    return fault is None


@torch.inference_mode()
def _fault(device: torch.device, dtype: torch.dtype, bits: Bits) -> str | None:
    """Compare two small products with their definition: few rows, and many."""
    outputs, inputs, group = 128, 256, 64
    numbers = torch.arange(outputs * inputs, device=device) * 37 % 251 % 2**bits
    scales = (1 + torch.arange(outputs * inputs // group, device=device)).view(outputs, -1) / 1024
    scales = scales.to(dtype)
    offsets = torch.full_like(scales, 2 ** (bits - 1))
    weight = GroupedWeight(pack(numbers.view(outputs, -1), bits), scales, offsets, group, bits)
    layer = MarlinLinear(weight, torch.arange(outputs, device=device) / 64, dtype)
    expected = weight.dequantized() + (torch.arange(outputs, device=device) / 64)[:, None]
    x = torch.eye(inputs, dtype=dtype, device=device)
    for rows in (x, x[:3]):
        gap = (layer(rows).T.float() - expected[:, : len(rows)]).abs().max()
        if not gap <= 0.01 * expected.abs().max():
            return f"products of {len(rows)} rows are off by {float(gap):.2g}"
    return None


def words(weight: GroupedWeight) -> Tensor:
    """Return the integers [inputs * bits / 32, outputs] int32 as GPTQ has them: an output's in a row's words.

    Ours lie in bytes in the same order, the first lowest, and bytes in a word do so, too.
    """
    return weight.packed.contiguous().view(torch.int32).T.contiguous()


class MarlinLinear(nn.Module):
    """A linear layer x [..., inputs] -> [..., outputs] in half precision on a GPU."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._order, self.outputs = weight.order, weight.outputs
        self.weight = weight.scales.new_empty(0, dtype=dtype)
        layer: Any = _kind()(
            bits=weight.bits,
            group_size=-1 if weight.group == weight.inputs else weight.group,
            desc_act=False,  # the inputs come in the order of the integers
            sym=True,
            in_features=weight.inputs,
            out_features=weight.outputs,
            bias=bias is not None,
            dtype=dtype,
        ).to(weight.packed.device)
        layer.qweight.data.copy_(words(weight))
        layer.scales.data.copy_(weight.scales.T)
        if bias is not None:
            layer.bias.data.copy_(bias)
        layer.post_init()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.outputs)
        if self._order is not None:
            rows = rows.index_select(1, self._order)
        y: Tensor = self.layer(rows.contiguous())
        return y.view(*x.shape[:-1], self.outputs)


def _kind() -> Any:
    return getattr(importlib.import_module(_MODULE), _LAYER)
