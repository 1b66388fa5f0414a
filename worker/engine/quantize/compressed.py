"""Checkpoints in the layout `pack-quantized` of compressed-tensors, with weights alone quantised.

`weight_packed` [outputs, inputs * bits / 32] int32 has signed integers plus 2^(bits - 1), the first in the
lowest bits; `weight_scale` [outputs, groups]; `weight_zero_point` [outputs * bits / 32, groups] the like,
packed along outputs; older ones have `weight_g_idx` [inputs], the group of each input.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from worker.engine.quantize import fields
from worker.engine.quantize.checkpoint import Read, Shapes
from worker.engine.quantize.gptq import check_order, order_of
from worker.engine.quantize.weights import Bits, GroupedWeight, pack


@dataclass(frozen=True)
class Compressed:
    """What its config says; raises ValueError for what is not supported."""

    bits: Bits
    group: int
    symmetric: bool
    reordered: bool

    main = "weight_packed"

    @classmethod
    def read(cls, config: dict[str, Any]) -> "Compressed":
        schemes = list((config.get("config_groups") or {}).values())
        if not schemes:
            raise ValueError("it has no config_groups")
        for scheme in schemes:
            layout = scheme.get("format") or config.get("format")
            if layout != "pack-quantized":
                raise ValueError(f"the layout {layout!r} is not known; pack-quantized is")
            if scheme.get("input_activations"):
                raise ValueError("activations are quantised, too, which is not supported")
        if _runs_transforms(config):
            raise ValueError("its transform_config has activations transformed, which is not supported")
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise ValueError(f"the sparsity {config['sparsity_config']['format']!r} is not supported")
        weights = schemes[0]["weights"]
        if any(scheme["weights"] != weights for scheme in schemes):
            raise ValueError("its config_groups differ in their weights, which is not supported")
        if weights.get("type", "int") != "int":
            raise ValueError(f"weights of type {weights['type']!r} are not supported; int is")
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
        if strategy not in ("group", "channel"):
            raise ValueError(f"the strategy {strategy!r} is not known; group and channel are")
        return cls(
            fields.known_bits(weights.get("num_bits")),
            fields.known_group(weights.get("group_size")) if strategy == "group" else -1,
            bool(weights.get("symmetric", True)),
            weights.get("actorder") in ("group", "dynamic"),
        )

    def shapes(self, outputs: int, inputs: int) -> Shapes:
        groups = fields.groups(inputs, self.group)
        shapes: Shapes = {
            "weight_packed": (outputs, math.ceil(inputs * self.bits / 32)),
            "weight_scale": (outputs, groups),
        }
        if not self.symmetric:
            shapes["weight_zero_point"] = (math.ceil(outputs * self.bits / 32), groups)
        return shapes | ({"weight_g_idx": (inputs,)} if self.reordered else {})

    def check(self, read: Read) -> None:
        check_order(read, "weight_g_idx", read("weight_scale").shape[1], self.reordered)
        if self.symmetric and _is_any(read, "weight_zero_point"):
            raise ValueError("weight_zero_point has zero points, and the config says symmetric")

    def unpack(self, read: Read) -> GroupedWeight:
        scales = read("weight_scale")
        integers = fields.split(read("weight_packed"), self.bits)
        if self.symmetric:
            zeros = torch.full_like(scales, 2 ** (self.bits - 1))
        else:
            packed = fields.split(read("weight_zero_point").T, self.bits).T[: len(scales)]
            zeros = packed.to(scales.dtype).contiguous()
        order = order_of(read("weight_g_idx"), scales.shape[1]) if self.reordered else None
        if order is not None:
            integers = integers[:, order]
        group = integers.shape[1] // scales.shape[1]
        return GroupedWeight(pack(integers, self.bits), scales, zeros, group, self.bits, order=order)


def _is_any(read: Read, part: str) -> bool:
    """Tell whether a layer has a tensor, and anything but zero in it."""
    try:
        return bool(read(part).any())
    except ValueError:
        return False


def _runs_transforms(config: dict[str, Any]) -> bool:
    """Tell whether rotations are computed when the model runs; those of weights are in them already."""
    schemes = ((config.get("transform_config") or {}).get("config_groups") or {}).values()
    places = [str(each.get("location")) for scheme in schemes for each in scheme.get("apply", [])]
    return not all(place.startswith("weight_") for place in places)
