"""Checkpoints that come quantised: which layout they have, and whether all of it is there."""

import math
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from worker.engine.quantize import hollow
from worker.engine.quantize.tensors import Tensors
from worker.engine.quantize.weights import Bits, GroupedWeight

Read = Callable[[str], Tensor]
"""Returns a tensor of one layer by the last part of its name."""
Shapes = dict[str, tuple[int, ...]]


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
        linears = hollow.linears(model)
        quantised = {
            name.removesuffix(f".{layout.main}") for name in tensors.names if name.endswith(f".{layout.main}")
        }
        if not quantised:
            raise ValueError(f"the checkpoint has no {layout.main}, so that nothing in it is quantised")
        if strange := sorted(quantised - linears.keys()):
            raise ValueError(f"the model has no linear layer {strange[0]} ({len(strange)} such weights)")
        beside = {_parent(name) for name in quantised}
        for name, linear in linears.items():
            if name in quantised:
                _check(layout, tensors, name, linear)
            elif type(linear) is hollow.Hollow:
                raise ValueError(f"there is no {name}.{layout.main}")
            elif f"{name}.weight" not in tensors and _parent(name) in beside:
                raise ValueError(f"the checkpoint has neither {name}.{layout.main} nor {name}.weight")
        return quantised

    return those


def unpack(layout: Layout, tensors: Tensors, name: str) -> GroupedWeight:
    """Return the weight of a layer."""
    return layout.unpack(lambda part: tensors.read(f"{name}.{part}"))


def unpacked_bytes(layout: Layout, outputs: int, inputs: int) -> tuple[Bits, int]:
    """Return the bits of a layer's integers, and what it takes with scales and offsets in half precision."""
    shapes = layout.shapes(outputs, inputs)
    scales = next(shape for part, shape in shapes.items() if part in ("scales", "weight_scale"))
    ordered = any(part.endswith("g_idx") for part in shapes)
    packed = outputs * inputs * layout.bits // 8
    return layout.bits, packed + 4 * math.prod(scales) + (8 * inputs if ordered else 0)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _check(layout: Layout, tensors: Tensors, name: str, linear: Any) -> None:
    for part, shape in layout.shapes(linear.out_features, linear.in_features).items():
        whole = f"{name}.{part}"
        if whole not in tensors:
            raise ValueError(f"the checkpoint has no {whole}")
        if tensors.shape(whole) != shape:
            raise ValueError(f"{whole} is {tensors.shape(whole)}; the configs make it {shape}")
    try:
        layout.check(lambda part: tensors.read(f"{name}.{part}"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
