"""Our own layout of quantised weights in safetensors: scales and minima as they are.

`packed` [outputs, inputs * bits / 8] uint8, `scales` and `offsets` [outputs, groups] float16 of a
GroupedWeight with minima. Other layouts have integer zero points: to round to these is an error of its own.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.engine.quantize import fields
from worker.engine.quantize.checkpoint import Read, Shapes
from worker.engine.quantize.recipe import Recipe, fitting_group
from worker.engine.quantize.weights import Bits, GroupedWeight

METHOD = "longhaul"
_VERSION = 1


@dataclass(frozen=True)
class Own:
    """Weights of `bits`, in groups of `group` inputs or the next that divides them."""

    bits: Bits
    group: int

    main = "packed"

    @classmethod
    def read(cls, config: dict[str, Any]) -> "Own":
        """Return what a config says; raises ValueError for what is not supported."""
        if config.get("version") != _VERSION:
            raise ValueError(f"the layout longhaul {config.get('version')} is not known; {_VERSION} is")
        return cls(fields.known_bits(config.get("bits")), fields.known_group(config.get("group")))

    def shapes(self, outputs: int, inputs: int) -> Shapes:
        group = fitting_group(inputs, self.group)
        if group is None:
            raise ValueError(f"{inputs} inputs cannot be divided into groups of {self.group}")
        parts = (outputs, inputs // group)
        return {"packed": (outputs, inputs * self.bits // 8), "scales": parts, "offsets": parts}

    def check(self, read: Read) -> None:
        pass

    def unpack(self, read: Read) -> GroupedWeight:
        packed, scales, offsets = read("packed"), read("scales"), read("offsets")
        group = packed.shape[1] * 8 // self.bits // scales.shape[1]
        return GroupedWeight(packed, scales, offsets, group, self.bits, minimum=True)


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Return the `quantization_config` of weights made by a recipe."""
    own = {"quant_method": METHOD, "version": _VERSION, "bits": recipe.bits, "group": recipe.group}
    return own | {"method": recipe.method}


def tensors_of(weights: dict[str, GroupedWeight]) -> dict[str, Tensor]:
    """Return the tensors of weights with minima, by name."""
    return {
        f"{name}.{part}": getattr(grouped, part).cpu().contiguous()
        for name, grouped in weights.items()
        for part in ("packed", "scales", "offsets")
    }
