"""Checkpoints in AutoAWQ's layout `gemm`: 4 bits, zero points as they are.

`qweight` [inputs, outputs / 8] and `qzeros` [groups, outputs / 8] int32 have eight outputs in a word, in the
order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on; `scales` [groups, outputs].
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from worker.engine.quantize import fields
from worker.engine.quantize.checkpoint import Read, Shapes
from worker.engine.quantize.weights import Bits, GroupedWeight, pack

_FIELD_OF = [0, 4, 1, 5, 2, 6, 3, 7]
"""The field that an output of a word is in."""


@dataclass(frozen=True)
class Awq:
    """What its config says; raises ValueError for what is not supported."""

    group: int

    main = "qweight"
    bits: ClassVar[Bits] = 4

    @classmethod
    def read(cls, config: dict[str, Any]) -> "Awq":
        named = config.get("version") or config.get("checkpoint_format") or config.get("format")
        layout = str(named or "gemm").lower()
        if layout != "gemm":
            raise ValueError(f"the layout {layout!r} is not known; gemm is")
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise ValueError(f"weights of {bits} bits are not supported; those of 4 are")
        return cls(fields.known_group(config.get("group_size", config.get("q_group_size"))))

    def shapes(self, outputs: int, inputs: int) -> Shapes:
        groups = fields.groups(inputs, self.group)
        return {
            "qweight": (inputs, outputs // 8),
            "qzeros": (groups, outputs // 8),
            "scales": (groups, outputs),
        }

    def check(self, read: Read) -> None:
        pass

    def unpack(self, read: Read) -> GroupedWeight:
        scales = read("scales").T.contiguous()
        integers = _split(read("qweight")).T
        zeros = _split(read("qzeros")).T.to(scales.dtype).contiguous()
        return GroupedWeight(pack(integers, 4), scales, zeros, integers.shape[1] // scales.shape[1])


def _split(words: Tensor) -> Tensor:
    """Return the integers [rows, outputs] of words [rows, outputs / 8]."""
    return fields.split(words, 4).unflatten(1, (-1, 8))[..., _FIELD_OF].flatten(1)
