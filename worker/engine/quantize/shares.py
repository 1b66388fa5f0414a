"""What a rank of a team has of a product with integers: a part of its outputs, or of its inputs.

By the styles of transformers' plan for nn.Linear, and with the same sums and gathers over the team
(Megatron-LM, Shoeybi et al. 2019). A part's integers stand for what they stand for in the whole.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from worker.engine import parallel
from worker.engine.quantize import hollow
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.weights import GroupedWeight

_OUTPUTS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
"""Styles by outputs, and whether those of all ranks are gathered."""
_INPUTS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
"""Styles by inputs, and whether a rank is given all of them."""
_WHOLE = {"replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"}
_SMALLEST_GROUP = 32
"""Of what the fast products take."""


def put(model: Any, name: str, whole: GroupedWeight) -> None:
    """Put this rank's part of a weight in the place of a share's product; raises ValueError with one line."""
    team, linear = parallel.current(), model.get_submodule(name)
    assert team is not None
    bias = None if linear.bias is None else local(linear.bias)
    style = parallel.style_of(model, name)
    try:
        if style in _OUTPUTS:
            part = outputs_of(whole, *_own(whole.outputs, team, "outputs"))
            made = _product(part, bias, model, team)
            hollow.put(model, name, Gathered(made, whole.outputs) if _OUTPUTS[style] else made)
        elif style in _INPUTS:
            hollow.put(model, name, _summed(whole, bias, model, team, _INPUTS[style]))
        elif style is None or style in _WHOLE:
            hollow.put(model, name, _product(whole, bias, model, team))
        else:
            raise ValueError(f"quantised weights are not spread as {style!r}")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def put_rows(model: Any, name: str, rows: GroupedWeight, outputs: int) -> None:
    """Put a layer of so many `outputs` in its place, of which this rank has `rows`, and all get all."""
    team, linear = parallel.current(), model.get_submodule(name)
    assert team is not None
    made = _product(rows, None if linear.bias is None else local(linear.bias), model, team)
    hollow.put(model, name, made if rows.outputs == outputs else Gathered(made, outputs))


def local(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local().data if isinstance(tensor, DTensor) else tensor.data


def outputs_of(whole: GroupedWeight, start: int, end: int) -> GroupedWeight:
    """Return the weight of some outputs."""
    packed, scales, offsets = (
        each[start:end].clone() for each in (whole.packed, whole.scales, whole.offsets)
    )
    return replace(whole, packed=packed, scales=scales, offsets=offsets)


def inputs_of(whole: GroupedWeight, start: int, end: int) -> GroupedWeight:
    """Return the weight of some inputs in the order of the integers, which must be in whole bytes.

    Where these do not begin and end with groups, smaller ones with the same scales take their place.
    """
    group = math.gcd(whole.group, start, end)
    groups = torch.arange(start, end, group) // whole.group
    packed = whole.packed[:, start * whole.bits // 8 : end * whole.bits // 8].clone()
    scales, offsets = whole.scales[:, groups], whole.offsets[:, groups]
    return replace(whole, packed=packed, scales=scales, offsets=offsets, group=group, order=None)


def _own(count: int, team: parallel.Team, what: str) -> tuple[int, int]:
    """Return which of so many things are this rank's, as torch.chunk and transformers divide them."""
    each = -(-count // team.size)
    start = team.rank * each
    if count <= each * (team.size - 1):
        raise ValueError(f"{count} {what} cannot be divided among {team.size} ranks; fewer ranks can")
    return start, min(count, start + each)


def _product(weight: GroupedWeight, bias: Tensor | None, model: Any, team: parallel.Team) -> IntLinear:
    return IntLinear(weight.to(team.device), bias, model.dtype)


def _summed(
    whole: GroupedWeight, bias: Tensor | None, model: Any, team: parallel.Team, given_all: bool
) -> "Summed":
    """Return this rank's part of a product by inputs.

    Those that lie together, if its integers lie so as well. Else each rank has some whole groups, and is told
    all inputs: of an order by activations, or groups that would come out too small.
    """
    start, end = _own(whole.inputs, team, "inputs")
    chosen: Tensor | None = None
    if whole.order is not None or math.gcd(whole.group, start, end) < _SMALLEST_GROUP:
        groups = _own(whole.inputs // whole.group, team, f"groups of {whole.group} inputs")
        start, end = (each * whole.group for each in groups)
        chosen = torch.arange(start, end) if whole.order is None else whole.order[start:end]
    elif given_all:
        chosen = torch.arange(start, end)
    made = _product(inputs_of(whole, start, end), None, model, team)
    return Summed(made, bias, whole.inputs, None if chosen is None else chosen.to(team.device), given_all)


class Gathered(nn.Module):
    """A layer x [..., inputs] -> [..., outputs of all ranks], of which each has some."""

    def __init__(self, product: IntLinear, outputs: int) -> None:
        super().__init__()
        self.product, self.out_features = product, outputs

    @property
    def weight(self) -> Any:
        return self.product.weight

    def forward(self, x: Tensor) -> Tensor:
        return gathered(self.product(x), self.out_features)


class Summed(nn.Module):
    """A layer x [..., inputs] -> [..., outputs] that each rank computes for some inputs; all get the sum.

    A rank is given its own inputs, or all (`given_all`); `chosen` [n] are those that its product takes of all
    (None: it takes what it is given).
    """

    bias: Tensor | None
    _chosen: Tensor | None

    def __init__(
        self, product: IntLinear, bias: Tensor | None, inputs: int, chosen: Tensor | None, given_all: bool
    ) -> None:
        super().__init__()
        self.product, self.in_features, self._given_all = product, inputs, given_all
        self.register_buffer("bias", None if bias is None else bias.to(product.weight.dtype), False)
        self.register_buffer("_chosen", chosen, False)

    @property
    def weight(self) -> Any:
        return self.product.weight

    def forward(self, x: Tensor) -> Tensor:
        if self._chosen is not None:
            x = x if self._given_all else gathered(x, self.in_features)
            x = x.index_select(-1, self._chosen)
        y = self.product(x)
        dist.all_reduce(y)
        return y if self.bias is None else y + self.bias


def gathered(part: Tensor, total: int) -> Tensor:
    """Return the last dimension of all ranks' tensors, one behind another: `total` numbers."""
    size = dist.get_world_size()
    part = F.pad(part, (0, -(-total // size) - part.shape[-1])).contiguous()  # all have the same size
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part)
    return torch.cat(parts, -1)[..., :total]
