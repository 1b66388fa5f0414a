"""How weights are to be quantised."""

from dataclasses import dataclass
from typing import Literal

from worker.engine.quantize.weights import Bits

Method = Literal["rtn", "sampled", "calibrated"]
GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Recipe:
    """`bits` in groups of `group` inputs or fewer.

    `method` rtn rounds to the nearest; sampled chooses scales by what goes into a product while the model
    runs over tokens of its own; calibrated does so over given text, and makes up for errors.
    """

    bits: Bits
    group: int = 64
    method: Method = "sampled"

    def group_of(self, inputs: int) -> int | None:
        """Return the group of a product with so many inputs, if it can have any."""
        return fitting_group(inputs, self.group)


def fitting_group(inputs: int, most: int = GROUPS[0]) -> int | None:
    """Return the largest group that divides inputs, up to `most`."""
    return next((group for group in GROUPS if group <= most and inputs % group == 0), None)
