"""Quantised weights put in a model in the place of its products."""

from typing import Any

from torch import Tensor

from worker.engine import parallel
from worker.engine.quantize import experts, hollow, int_experts, mixing, shares
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.weights import GroupedWeight


def fill(model: Any, weights: dict[str, GroupedWeight]) -> None:
    """Give products of a model quantised weights, by name; experts all of theirs at once."""
    owners = {}
    for name, grouped in weights.items():
        owner = experts.owner_of(model, name)
        if owner is not None:
            owners[owner] = True
        elif parallel.is_share(model):
            shares.put(model, name, grouped)
        else:
            replace(model, name, grouped)
    for owner in owners:
        fill_experts(model, owner, weights)


def fill_experts(model: Any, name: str, weights: dict[str, GroupedWeight]) -> int_experts.IntExperts:
    """Put experts with integers in the place of those of a model, by name."""
    module = model.get_submodule(name)
    up, down = (
        [
            product(model, weights[f"{name}.{number}.{parameter}"], experts.bias(module, parameter, number))
            for number in range(module.num_experts)
        ]
        for parameter in mixing.parameters(module)
    )
    made = int_experts.IntExperts(module, up, down)
    hollow.put(model, name, made)
    return made


def replace(model: Any, name: str, grouped: GroupedWeight) -> IntLinear:
    """Put a layer of integers in the place of a linear layer, by name."""
    made = product(model, grouped, model.get_submodule(name).bias)
    hollow.put(model, name, made)
    return made


def product(model: Any, grouped: GroupedWeight, bias: Tensor | None) -> IntLinear:
    """Return a layer of integers for a model, where that is."""
    return IntLinear(grouped.to(model.device), None if bias is None else bias.data, model.dtype)
