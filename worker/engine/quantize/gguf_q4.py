"""Weights of a GGUF file kept at its bits: blocks of 32 of the types Q4_0, Q4_1 and Q8_0.

A block has a scale d (float16), in Q4_1 a minimum m, and its integers; of 4 bits, byte j has those of the
inputs j (low) and j + 16. They stand for (q - 8) d, q d + m, and in 8 bits, signed, q d.
"""

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from worker.engine.quantize import filling, hollow
from worker.engine.quantize.weights import Bits, GroupedWeight, pack

log = logging.getLogger(__name__)
_BLOCK = 32
_KINDS: dict[Any, tuple[Bits, bool]] = {
    gguf.GGMLQuantizationType.Q4_0: (4, False),
    gguf.GGMLQuantizationType.Q4_1: (4, True),
    gguf.GGMLQuantizationType.Q8_0: (8, False),
}


def keep(model: Any, file: Path) -> None:
    """Put the file's own integers in place of the products that a model read from it has expanded.

    Only where they stand for the very numbers that are in the model: a file may have its rows, or all of a
    weight, in another form. The rest, and other types, stay expanded, which is logged.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = _names(model, file)
    kept, expanded = 0, Counter[str]()
    for name, linear in hollow.products(model).items():
        tensor: Any = tensors.get(f"{names.get_name(name)}.weight")
        grouped = unpack(tensor) if tensor is not None and tensor.tensor_type in _KINDS else None
        if grouped is not None:
            grouped = _as_in(model, grouped, linear.weight.data)
        if grouped is None:
            expanded[tensor.tensor_type.name if tensor is not None else "?"] += 1
            continue
        filling.fill(model, {name: grouped})
        kept += 1
    log.info("gguf products", extra={"kept": kept, "expanded": dict(expanded)})


def kept(model: Any, file: Path) -> dict[str, tuple[Bits, int]]:
    """Return the bits and bytes of the products that `keep` would keep, by name, from the file's header."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names, found = _names(model, file), {}
    for name in hollow.products(model):
        tensor = tensors.get(f"{names.get_name(name)}.weight")
        if tensor is not None and tensor.tensor_type in _KINDS:
            bits = _KINDS[tensor.tensor_type][0]
            found[name] = bits, int(tensor.n_elements) // _BLOCK * (_BLOCK * bits // 8 + 4)
    return found


def unpack(tensor: Any) -> GroupedWeight:
    """Return a tensor of a GGUFReader, of a type in blocks of 32, as it is."""
    bits, minimum = _KINDS[tensor.tensor_type]
    blocks = torch.from_numpy(tensor.data.copy()).view(tensor.data.shape[0], -1, _bytes(bits, minimum))
    head = 4 if minimum else 2
    numbers = blocks[..., :head].contiguous().view(torch.float16)
    scales = numbers[..., 0].contiguous()
    if bits == 8:
        integers = blocks[..., head:].int() + 128 & 255  # signed bytes, as unsigned ones from their least
        offsets = torch.full_like(scales, 128)
    else:
        integers = torch.cat((blocks[..., head:] & 15, blocks[..., head:] >> 4), -1)
        offsets = numbers[..., 1].contiguous() if minimum else torch.full_like(scales, 8)
    packed = pack(integers.flatten(1), bits)
    return GroupedWeight(packed, scales, offsets, _BLOCK, bits, minimum)


def _bytes(bits: int, minimum: bool) -> int:
    return (4 if minimum else 2) + _BLOCK * bits // 8


def _names(model: Any, file: Path) -> Any:
    architecture = gguf.GGUFReader(file).fields["general.architecture"].contents()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[architecture], model.config.get_text_config().num_hidden_layers)


def _as_in(model: Any, grouped: GroupedWeight, weight: Tensor) -> GroupedWeight | None:
    """Return the weight that stands for a model's own numbers; rows of queries and keys may have to move."""
    if (grouped.outputs, grouped.inputs) != tuple(weight.shape):
        return None
    text = model.config.get_text_config()
    read = grouped.dequantized(weight.dtype)
    if torch.equal(read, weight):
        return grouped
    for heads in {text.num_attention_heads, getattr(text, "num_key_value_heads", text.num_attention_heads)}:
        if grouped.outputs % (2 * heads) == 0:
            # Halves of a rotated head, woven in the file, lie apart in transformers.
            rows = torch.arange(grouped.outputs).view(heads, -1, 2).transpose(1, 2).flatten()
            if torch.equal(read[rows], weight):
                packed, scales, offsets = grouped.packed[rows], grouped.scales[rows], grouped.offsets[rows]
                return replace(grouped, packed=packed, scales=scales, offsets=offsets)
    return None
