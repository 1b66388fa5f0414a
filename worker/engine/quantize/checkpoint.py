"""Checkpoints that come quantised: which layout they have, and whether all of it is there."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from worker.engine.quantize import experts, hollow, merging
from worker.engine.quantize import linear as integer
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.tensors import Tensors
from worker.engine.quantize.weights import Bits, GroupedWeight

Read = Callable[[str], Tensor]
"""Returns a tensor of one layer by the last part of its name."""
Shapes = dict[str, tuple[int, ...]]
_FLOATS = {"F16", "BF16", "F32"}
_DTYPES = {"packed": {"U8"}, "scales": _FLOATS, "offsets": _FLOATS, "weight_scale": _FLOATS}
"""Of what is not words of 32 bits."""


class Layout(Protocol):
    """How quantised weights of so many bits lie in a checkpoint. `main` is what every quantised layer has."""

    main: str

    @property
    def bits(self) -> Bits: ...

    def shapes(self, outputs: int, inputs: int) -> Shapes:
        """Return the tensors of a layer, and how large they are."""

    def check(self, read: Read) -> None:
        """Raise ValueError for a layer whose shapes are right, but not what is in them."""

    def unpack(self, read: Read) -> GroupedWeight:
        """Return the weight of a layer."""


def choose(layout: Layout) -> hollow.Choose:
    """Return what tells which layers a checkpoint has quantised weights of.

    That raises ValueError, in one line, when they are not those that the model's config asks for.
    """

    def those(tensors: Tensors, model: nn.Module) -> set[str]:
        products = hollow.all_products(model)
        quantised = _quantised(layout, tensors, model)
        if not quantised:
            raise ValueError(f"the checkpoint has no {layout.main}, so that nothing in it is quantised")
        if strange := sorted(quantised - products.keys()):
            raise ValueError(f"the model has no linear layer {strange[0]} ({len(strange)} such weights)")
        needed = {name for names in hollow.empty(model).values() for name in names}
        owners = {each.owner for name in quantised if isinstance(each := products[name], experts.Part)}
        beside = {_parent(name) for name in quantised}
        for name, product in products.items():
            if name in quantised:
                check(layout, tensors, name, product)
            elif name in needed or getattr(product, "owner", None) in owners:
                raise ValueError(f"there is no {name}.{layout.main}")
            elif isinstance(product, experts.Part):
                continue
            elif f"{name}.weight" not in tensors and _parent(name) in beside:
                raise ValueError(f"the checkpoint has neither {name}.{layout.main} nor {name}.weight")
        return quantised

    return those


def unpack(layout: Layout, tensors: Tensors, name: str) -> GroupedWeight:
    """Return the weight of a layer, which the checkpoint may have in several."""
    found = [
        layout.unpack(lambda part, each=each: tensors.read(f"{each}.{part}"))  # type: ignore[misc]
        for each in tensors.joined.get(name, [name])
    ]
    if len(found) == 1:
        return found[0]
    return integer.join([IntLinear(weight) for weight in found]).grouped


def _quantised(layout: Layout, tensors: Tensors, model: nn.Module) -> set[str]:
    """Return the names of a model's products that a checkpoint has quantised weights of, under any name."""
    end = f".{layout.main}"
    names = {name.removesuffix(end) for name in tensors.names if name.endswith(end)}
    strange = [f"{name}.weight" for name in names - hollow.all_products(model).keys()]
    for weight, source in merging.sources(model, strange, experts.weights(model)).items():
        for part, merged in _apart(model, weight, source).items():
            tensors.joined[part] = merged
            names.difference_update(merged)
    return names | tensors.joined.keys()


def _apart(model: nn.Module, weight: str, source: merging.Source) -> dict[str, list[str]]:
    """Return, by part of experts, the quantised weights that are merged into it; raises ValueError."""
    owner, _, parameter = weight.rpartition(".")
    module: Any = model.get_submodule(owner)
    rows = source.apart()
    if rows is None or module.is_transposed:
        raise ValueError(f"{source.all_names[0]} is quantised, and cannot be merged into {weight}")
    if len(rows) != module.num_experts:
        raise ValueError(f"of {module.num_experts} experts that make {weight} {len(rows)} are quantised")
    return {
        f"{owner}.{number}.{parameter}": [name.removesuffix(".weight") for name in row]
        for number, row in enumerate(rows)
    }


def unpacked_bytes(layout: Layout, outputs: int, inputs: int) -> tuple[Bits, int]:
    """Return the bits of a layer's integers, and what it takes with scales and offsets in half precision."""
    shapes = layout.shapes(outputs, inputs)
    scales = next(shape for part, shape in shapes.items() if part in ("scales", "weight_scale"))
    ordered = any(part.endswith("g_idx") for part in shapes)
    packed = outputs * inputs * layout.bits // 8
    return layout.bits, packed + 4 * math.prod(scales) + (8 * inputs if ordered else 0)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def check(layout: Layout, tensors: Tensors, name: str, linear: Any) -> None:
    """Raise ValueError, in one line, when a checkpoint does not have all of a layer's quantised weight."""
    names = tensors.joined.get(name, [name])
    shapes = layout.shapes(linear.out_features // len(names), linear.in_features)
    for each in names:
        _check_one(layout, tensors, each, shapes)
    if len(names) > 1 and (part := next((part for part in shapes if part.endswith("g_idx")), None)):
        first, *others = (tensors.read(f"{each}.{part}") for each in names)
        if not all(torch.equal(each, first) for each in others):
            raise ValueError(f"{' and '.join(names)} have their inputs in different orders")


def _check_one(layout: Layout, tensors: Tensors, name: str, shapes: Shapes) -> None:
    for part, shape in shapes.items():
        whole = f"{name}.{part}"
        if whole not in tensors:
            raise ValueError(f"the checkpoint has no {whole}")
        if tensors.shape(whole) != shape:
            raise ValueError(f"{whole} is {tensors.shape(whole)}; the configs make it {shape}")
        known, dtype = _DTYPES.get(part, {"I32"}), tensors.dtype(whole)
        if dtype not in known:
            raise ValueError(f"{whole} is {dtype}; {' or '.join(sorted(known))} is known")
        if known is _FLOATS and not tensors.read(whole).isfinite().all():
            raise ValueError(f"{whole} has numbers that are not finite")
    try:
        layout.check(lambda part: tensors.read(f"{name}.{part}"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
