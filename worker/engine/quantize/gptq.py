"""Checkpoints in the layout of AutoGPTQ and GPTQModel.

`qweight` [inputs * bits / 32, outputs] int32 has the integers of neighbouring inputs in a word, the first in
the lowest bits; `qzeros` [groups, outputs * bits / 32] those of neighbouring outputs; `scales` [groups,
outputs]; `g_idx` [inputs] the group of each input. Zero points are stored minus one, except in the format
`gptq_v2`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.engine.quantize import fields
from worker.engine.quantize.checkpoint import Read, Shapes
from worker.engine.quantize.weights import Bits, GroupedWeight, pack

_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Gptq:
    """What its config says; raises ValueError for what is not supported."""

    bits: Bits
    group: int
    reordered: bool
    minus_one: bool

    main = "qweight"

    @classmethod
    def read(cls, config: dict[str, Any]) -> "Gptq":
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise ValueError(f"the layout {layout!r} is not known; gptq and gptq_v2 are")
        return cls(
            fields.known_bits(config.get("bits")),
            fields.known_group(config.get("group_size")),
            bool(config.get("desc_act", False)),
            layout == "gptq",
        )

    def shapes(self, outputs: int, inputs: int) -> Shapes:
        groups, in_word = fields.groups(inputs, self.group), 32 // self.bits
        shapes = {
            "qweight": (inputs // in_word, outputs),
            "qzeros": (groups, outputs // in_word),
            "scales": (groups, outputs),
        }
        return shapes | ({"g_idx": (inputs,)} if self.reordered else {})

    def check(self, read: Read) -> None:
        check_order(read, "g_idx", len(read("scales")), self.reordered)

    def unpack(self, read: Read) -> GroupedWeight:
        qweight, qzeros, scales = read("qweight"), read("qzeros"), read("scales").T.contiguous()
        integers = fields.split(qweight.T, self.bits)
        if self.minus_one:
            # Of all fields at once, as they were taken from: a carry belongs to the field above.
            qzeros = qzeros + _ONES[self.bits]
        zeros = fields.split(qzeros, self.bits).T.to(scales.dtype).contiguous()
        order = order_of(read("g_idx"), len(qzeros)) if self.reordered else None
        if order is not None:
            integers = integers[:, order]
        group = integers.shape[1] // scales.shape[1]
        return GroupedWeight(pack(integers, self.bits), scales, zeros, group, self.bits, order=order)


def check_order(read: Read, part: str, count: int, reordered: bool) -> None:
    """Raise ValueError when the groups of inputs, if a layer has them, are not `count` of one size, or are
    reordered and the config says that they are not.
    """
    try:
        groups = read(part)
    except ValueError:  # where it has to be there, it is
        return
    if not reordered and not groups.any():
        return  # nothing was written to it
    if order_of(groups, count) is not None and not reordered:
        raise ValueError(f"{part} has inputs in another order, and the config says that it does not")


def order_of(groups: Tensor, count: int) -> Tensor | None:
    """Return the inputs in the order of their `count` groups [inputs], None where they are in order.

    Raises ValueError when groups are not of one size.
    """
    if groups.min() < 0 or groups.max() >= count:
        raise ValueError(f"g_idx has groups {groups.min()} to {groups.max()}; there are {count}")
    sizes = torch.bincount(groups.long(), minlength=count)
    if (sizes != sizes[0]).any():
        raise ValueError("the groups of g_idx are not of one size")
    order = torch.argsort(groups.long(), stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order
