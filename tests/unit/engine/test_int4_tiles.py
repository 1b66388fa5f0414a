"""What torch's products of 4 bits on a GPU are given, over a stand-in on the CPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.engine import architectures, grouped, int4_standin
from worker.engine import guards, packed
from worker.engine.attention_flash import FlashAttention
from worker.engine.flash_standin import StandIn
from worker.engine.merged import MergedLayer
from worker.engine.quantize import tiles
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.tiles import TiledLinear

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with int4_standin.on_cpu():
        monkeypatch.setattr(tiles, "_serves", lambda device: True)
        yield


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_what_is_taken_for_the_product_is_what_the_stand_in_computes() -> None:
    assert tiles._fault(torch.device("cpu")) is None


@pytest.mark.parametrize(
    "group", [32, 128, *(pytest.param(group, marks=pytest.mark.long) for group in (64, 256))]
)
@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_few_and_many_rows_are_products_with_the_weight(group: int, minimum: bool, ordered: bool) -> None:
    weight = grouped.random_weight(24, 512, 4, group, minimum, ordered)
    bias = normal(24).bfloat16()
    layer = TiledLinear(weight, bias)
    by_itself = IntLinear(weight, bias, BF16)
    for rows in (0, 1, 5, 64, 65, 200):
        x = normal(rows, 512).bfloat16()
        precise = F.linear(x.double(), weight.dequantized(torch.float64), bias.double())
        assert (layer(x).dtype, layer(x).shape) == (BF16, (rows, 24))
        theirs, ours = ((each(x) - precise).square().sum().sqrt() for each in (by_itself, layer))
        assert ours <= 2 * theirs


def test_the_shape_of_x_is_kept_and_it_may_lie_anywhere() -> None:
    layer = TiledLinear(grouped.random_weight(16, 128))
    x = normal(2, 3, 130).bfloat16()[..., 1:129]
    assert layer(x).shape == (2, 3, 16)
    assert torch.equal(layer(x)[1, 2], layer(x[1, 2].contiguous()[None])[0])


def test_the_tiles_hold_every_integer() -> None:
    weight = grouped.random_weight(40, 384)
    assert torch.equal(tiles.untiled(TiledLinear(weight).tiles), weight.integers())


def test_the_numbers_are_those_that_torchs_product_on_a_cpu_multiplies_with() -> None:
    weight = grouped.random_weight(64, 128, 4, 32)
    scales = tiles.scales_and_zeros(weight)
    theirs = torch.ops.aten._weight_int4pack_mm_for_cpu(
        torch.eye(128, dtype=BF16),
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.integers().int(), 2),
        32,
        scales,
    )
    assert torch.allclose(
        theirs.T.float(), tiles.dequantized(weight.integers(), scales, 32).float(), rtol=0.008
    )


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (IntLinear(grouped.random_weight(16, 128), dtype=BF16), True),
        (IntLinear(grouped.random_weight(16, 256, group=256), dtype=BF16), True),
        (IntLinear(grouped.random_weight(16, 128), dtype=torch.float16), False),
        (IntLinear(grouped.random_weight(16, 128), dtype=BF16, exact=True), False),
        (IntLinear(grouped.random_weight(16, 128, 8), dtype=BF16), False),
        (IntLinear(grouped.random_weight(12, 128), dtype=BF16), False),
        (IntLinear(grouped.random_weight(16, 96), dtype=BF16), False),
        (IntLinear(grouped.random_weight(16, 384, group=384), dtype=BF16), False),
    ],
)
def test_only_what_torchs_product_takes_is_tiled(layer: IntLinear, taken: bool) -> None:
    faster = packed.fastest(layer)
    assert isinstance(faster, TiledLinear) == taken
    assert (faster is layer) == (not taken)
    assert packed.count_plain_integers(torch.nn.Sequential(faster)) == (not taken)


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(n, marks=pytest.mark.long) for n in ("llama", "qwen2"))]
)
def test_a_model_in_bfloat16_has_all_its_integers_tiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    monkeypatch.setitem(architectures.CONFIGS, name, architectures.CONFIGS[name] | sizes)
    model = grouped.quantize(architectures.build(name).bfloat16())
    guards.prepare(model, FlashAttention(StandIn(8), 8))
    assert all(isinstance(layer, MergedLayer) for layer in model.model.layers)
    assert sum(isinstance(module, TiledLinear) for module in model.modules()) == 8
    assert packed.count_plain_integers(model) == 0


def test_integers_of_8_bits_in_a_layer_are_tiled_no_more_than_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    monkeypatch.setitem(architectures.CONFIGS, "llama", architectures.CONFIGS["llama"] | sizes)
    model = architectures.build("llama").bfloat16()
    grouped.quantize(grouped.quantize(model, but=("o_proj",)), bits=8)
    guards.prepare(model)
    assert packed.count_plain_integers(model) == 2
    assert sum(isinstance(module, TiledLinear) for module in model.modules()) == 6
