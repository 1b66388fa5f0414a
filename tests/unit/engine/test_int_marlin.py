"""What Marlin is given, and what is done without it, over a stand-in for gptqmodel's layer on the CPU."""

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.engine import architectures, grouped, int4_standin
from tests.unit.engine.quantize import layouts
from worker.engine import guards, packed
from worker.engine.attention_flash import FlashAttention
from worker.engine.flash_standin import StandIn
from worker.engine.merged import MergedLayer
from worker.engine.quantize import marlin, tiles
from worker.engine.quantize.gptq import Gptq
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.marlin import MarlinLinear
from worker.engine.quantize.tiles import TiledLinear
from worker.engine.quantize.weights import Bits, GroupedWeight, pack

HALF, BF16 = torch.float16, torch.bfloat16
CPU = torch.device("cpu")


class Layer(nn.Module):
    """gptqmodel's MarlinLinear, as far as it is used: GPTQ's layout until `post_init`, which ends it."""

    off = 0.0

    def __init__(
        self,
        bits: int,
        group_size: int,
        desc_act: bool,
        sym: bool,
        in_features: int,
        out_features: int,
        bias: bool = False,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__()
        assert sym
        assert not desc_act
        self.bits, self.group = bits, in_features if group_size == -1 else group_size
        words = torch.empty(in_features * bits // 32, out_features, dtype=torch.int32)
        self.qweight = nn.Parameter(words, requires_grad=False)
        scales = torch.empty(in_features // self.group, out_features, dtype=dtype)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)

    def post_init(self) -> None:
        shifts = torch.arange(0, 32, self.bits)
        integers = self.qweight.T.long()[..., None] >> shifts & 2**self.bits - 1
        signed = integers.flatten(1).double() - 2 ** (self.bits - 1)
        self._weight = signed * self.scales.T.double().repeat_interleave(self.group, 1) + self.off
        del self.qweight

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        assert x.is_contiguous()
        bias = None if self.bias is None else self.bias.double()
        return F.linear(x.double(), self._weight, bias).to(x.dtype)


class Wrong(Layer):
    off = 0.5


class Broken(Layer):
    def post_init(self) -> None:
        raise RuntimeError("nvcc is not there\nand much more")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a kind of layer, `Layer` to begin with."""
    marlin._serves.cache_clear()
    monkeypatch.setattr(marlin, "_is_gpu", lambda device: True)
    monkeypatch.setattr(marlin, "_is_installed", lambda: True)

    def install(kind: Any) -> None:
        marlin._serves.cache_clear()
        monkeypatch.setattr(marlin, "_kind", lambda: kind)

    install(Layer)
    yield install
    marlin._serves.cache_clear()


def symmetric(
    outputs: int, inputs: int, bits: Bits = 4, group: int = 64, ordered: bool = False
) -> GroupedWeight:
    made = grouped.random_weight(outputs, inputs, bits, group, ordered=ordered, dtype=torch.float16)
    scales = made.scales.bfloat16().half()  # which both halves hold
    offsets = torch.full_like(scales, 2 ** (bits - 1))
    return GroupedWeight(made.packed, scales, offsets, group, bits, order=made.order)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("ordered", [False, True])
def test_few_and_many_rows_are_products_with_the_weight(bits: Bits, group: int, ordered: bool) -> None:
    weight = symmetric(64, 256, bits, group, ordered)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0)).half()
    faster = packed.fastest(IntLinear(weight, bias, HALF))
    assert isinstance(faster, MarlinLinear)
    for shape in ((1, 256), (2, 3, 256), (70, 256), (0, 256)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
        expected = F.linear(x.double(), weight.dequantized(torch.float64), bias.double()).half()
        assert faster(x).dtype == HALF
        torch.testing.assert_close(faster(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_words_are_those_of_a_gptq_checkpoint(bits: Bits) -> None:
    made = layouts.made(24, 64, bits, 32, symmetric=True)
    tensors = layouts.gptq(made, v2=False)
    weight = Gptq(bits, 32, False, True).unpack(tensors.__getitem__)
    assert torch.equal(marlin.words(weight), tensors["qweight"])


def changed(**fields: Any) -> GroupedWeight:
    return dataclasses.replace(symmetric(64, 256), **fields)


@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (IntLinear(symmetric(64, 256), dtype=HALF), True),
        (IntLinear(symmetric(64, 256), dtype=BF16), True),
        (IntLinear(symmetric(128, 64), dtype=HALF), True),
        (IntLinear(symmetric(64, 256), dtype=torch.float32), False),
        (IntLinear(symmetric(64, 256), dtype=HALF, exact=True), False),
        (IntLinear(symmetric(64, 64), dtype=HALF), False),  # no tile divides it
        (IntLinear(symmetric(72, 256), dtype=HALF), False),
        (IntLinear(symmetric(64, 768, group=256), dtype=HALF), False),
        (IntLinear(grouped.random_weight(64, 256), dtype=HALF), False),  # zero points of all sorts
        (IntLinear(changed(offsets=torch.full((64, 4), 7.0)), dtype=HALF), False),
        (IntLinear(changed(minimum=True), dtype=HALF), False),
        # float16 holds such a scale, and bfloat16 does not.
        (IntLinear(changed(scales=torch.full((64, 4), 1.0009765625).half()), dtype=HALF), True),
        (IntLinear(changed(scales=torch.full((64, 4), 1.0009765625).half()), dtype=BF16), False),
    ],
)
def test_only_what_marlin_takes_as_it_is_goes_there(layer: IntLinear, taken: bool) -> None:
    faster = packed.fastest(layer)
    assert isinstance(faster, MarlinLinear) == taken
    assert not marlin.fails(layer)


def test_without_gptqmodel_nothing_is_tried_and_nothing_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(marlin, "_is_installed", lambda: False)
    monkeypatch.setattr(marlin, "_kind", lambda: pytest.fail("it is asked"))
    layer = IntLinear(symmetric(64, 256), dtype=HALF)
    assert packed.fastest(layer) is layer
    assert not marlin.fails(layer)
    assert caplog.text == ""


@pytest.mark.parametrize(("kind", "reason"), [(Wrong, "are off by 0.5"), (Broken, "nvcc is not there")])
def test_a_product_that_is_wrong_is_not_used_and_counted(
    kind: Any, reason: str, installed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    installed(kind)
    layers = [IntLinear(symmetric(64, 256), dtype=HALF) for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        faster = nn.Sequential(*(packed.fastest(layer) for layer in layers))
    assert list(faster) == layers
    (said,) = caplog.records
    assert said.message == "no Marlin on this GPU: other products take its place"
    assert reason in vars(said)["reason"]
    assert packed.count_plain_integers(faster) == 3


def test_torchs_product_in_its_place_is_counted_too(
    installed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(Wrong)
    monkeypatch.setattr(tiles, "_serves", lambda device: True)
    layer = IntLinear(symmetric(64, 256), dtype=BF16)
    with int4_standin.on_cpu():
        faster = packed.fastest(layer)
        other = packed.fastest(IntLinear(grouped.random_weight(64, 256), dtype=BF16))
    assert isinstance(faster, TiledLinear)
    assert isinstance(other, TiledLinear)
    assert packed.count_plain_integers(nn.Sequential(faster, other)) == 1
    assert [vars(record)["count"] for record in caplog.records if "Marlin's" in record.message] == [1]


def test_a_model_with_symmetric_integers_has_all_of_them_in_marlin(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    monkeypatch.setitem(architectures.CONFIGS, "llama", architectures.CONFIGS["llama"] | sizes)
    model = architectures.build("llama").bfloat16()
    for name, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and "layers." in name:
            values = linear.weight.detach().float()
            scale = (values.abs().amax() / 7).bfloat16()
            integers = (values / scale).round().clamp(-8, 7) + 8
            scales = scale.expand(linear.out_features, linear.in_features // 64).contiguous()
            weight = GroupedWeight(pack(integers, 4), scales, torch.full_like(scales, 8), 64)
            model.set_submodule(name, IntLinear(weight, None, BF16))
    guards.prepare(model, FlashAttention(StandIn(8), 8))
    assert all(isinstance(layer, MergedLayer) for layer in model.model.layers)
    assert sum(isinstance(module, MarlinLinear) for module in model.modules()) == 8
    assert packed.count_plain_integers(model) == 0
