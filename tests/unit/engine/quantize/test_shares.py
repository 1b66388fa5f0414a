"""The parts of a weight that ranks of a team have stand, together, for what the whole stands for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine import grouped
from worker.engine import parallel
from worker.engine.quantize import shares
from worker.engine.quantize.weights import GroupedWeight


class Model(nn.Module):
    """One layer, and how a plan spreads it."""

    _tp_size = 2
    dtype = torch.float64

    def __init__(self, weight: GroupedWeight, style: str | None, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(weight.inputs, weight.outputs, bias=bias, dtype=torch.float64)
        self.tp_plan = {} if style is None else {"layer": style}


def ranks(
    weight: GroupedWeight, style: str | None, size: int, patch: pytest.MonkeyPatch, bias: bool = False
) -> list[Any]:
    """Return what each rank has of a layer."""
    made = []
    for rank in range(size):
        team = parallel.Team(rank, size, torch.device("cpu"), None, None)  # type: ignore[arg-type]
        patch.setattr(parallel, "current", lambda team=team: team)
        model = Model(weight, style, bias)
        shares.put(model, "layer", weight)
        made.append(model.layer)
    return made


def x_of(weight: GroupedWeight) -> Tensor:
    return torch.randn(5, weight.inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_by_outputs_are_rows_of_the_whole(
    bits: Any, ordered: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = grouped.random_weight(20, 64, bits, 32, ordered=ordered)
    parts = ranks(weight, "colwise", size, monkeypatch)
    assert torch.equal(torch.cat([part.grouped.dequantized() for part in parts]), weight.dequantized())
    assert len(parts[-1].grouped.packed) == (10 if size == 2 else 6), "the last one has what is left"


@pytest.mark.parametrize(("style", "given_all"), [("rowwise", False), ("rowwise_split_input", True)])
@pytest.mark.parametrize(
    ("inputs", "group", "size", "ordered", "groups"),
    [
        (128, 32, 2, False, {32}),
        (192, 64, 2, False, {32}),  # halves of 96
        (256, 256, 4, False, {64}),  # of a whole row
        (96, 32, 2, False, {32}),  # halves of 48: one rank has two groups, the other one
        (128, 32, 2, True, {32}),
        (224, 32, 3, True, {32}),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("minimum", [False, True])
def test_products_by_inputs_sum_to_that_of_the_whole(
    style: str,
    given_all: bool,
    inputs: int,
    group: int,
    size: int,
    ordered: bool,
    groups: set[int],
    bits: Any,
    minimum: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = grouped.random_weight(8, inputs, bits, group, minimum, ordered)
    x = x_of(weight)
    parts = ranks(weight, style, size, monkeypatch, bias=True)
    assert {part.product.grouped.group for part in parts} == groups
    assert all(part.product.bias is None for part in parts), "it would be added by each"
    monkeypatch.setattr(shares, "gathered", lambda given, total: x)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda y: None)
    each = -(-inputs // size)
    given = [x if given_all else x[:, rank * each : (rank + 1) * each] for rank in range(size)]
    found = sum(part(own) - part.bias for part, own in zip(parts, given, strict=True))
    torch.testing.assert_close(found, x @ weight.dequantized(torch.float64).T, rtol=1e-12, atol=1e-12)


def test_whole_groups_are_not_told_all_inputs_where_they_need_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(inputs: int, ordered: bool) -> list[bool]:
        weight = grouped.random_weight(8, inputs, ordered=ordered)
        return [part._chosen is not None for part in ranks(weight, "rowwise", 2, monkeypatch)]

    assert chosen(128, ordered=False) == [False, False]
    assert chosen(128, ordered=True) == chosen(96, ordered=False) == [True, True]


@pytest.mark.parametrize("style", [None, "replicate"])
def test_what_the_plan_does_not_spread_is_whole(style: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = grouped.random_weight(8, 64)
    for part in ranks(weight, style, 2, monkeypatch):
        assert torch.equal(part.grouped.dequantized(), weight.dequantized())


@pytest.mark.parametrize(
    ("weight", "style", "size", "reason"),
    [
        (grouped.random_weight(8, 64), "packed_colwise", 2, "layer: .* not spread as 'packed_colwise'"),
        (grouped.random_weight(8, 64, ordered=True), "rowwise", 3, "layer: 2 groups of 32 inputs .* 3 ranks"),
        (grouped.random_weight(2, 64), "colwise", 3, "layer: 2 outputs .* 3 ranks"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_its_name(
    weight: GroupedWeight, style: str, size: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        ranks(weight, style, size, monkeypatch)
    assert "\n" not in str(refused.value)
