"""Quantised checkpoints mean what their formats define, to the last bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine.quantize import layouts
from worker.engine.quantize import awq, checkpoint, compressed, gptq
from worker.engine.quantize.weights import GroupedWeight

GROUPS = pytest.mark.parametrize("group", [32, 64, 128, -1])
BITS = pytest.mark.parametrize("bits", [4, 8])
SYMMETRIC = pytest.mark.parametrize("symmetric", [True, False])


def unpacked(layout: checkpoint.Layout, parts: dict[str, Tensor]) -> GroupedWeight:
    shapes = layout.shapes(16, 256)
    assert {part: tuple(parts[part].shape) for part in shapes} == shapes
    layout.check(parts.__getitem__)
    return layout.unpack(parts.__getitem__)


def check(found: GroupedWeight, wanted: layouts.Quantised) -> None:
    assert found.bits == wanted.bits
    torch.testing.assert_close(found.dequantized(torch.float64), wanted.weight, rtol=1e-6, atol=1e-6)
    x = torch.randn(3, 256, dtype=torch.float64)
    torch.testing.assert_close(
        x @ found.dequantized(torch.float64).T, x @ wanted.weight.T, rtol=1e-5, atol=1e-5
    )


@GROUPS
@BITS
@SYMMETRIC
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("reordered", [False, True])
def test_gptq(group: int, bits: int, symmetric: bool, v2: bool, reordered: bool) -> None:
    weight = layouts.made(16, 256, bits, group, symmetric, shuffled=reordered)
    config: dict[str, Any] = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": reordered}
    layout = gptq.Gptq.read(config | ({"checkpoint_format": "gptq_v2"} if v2 else {}))
    check(unpacked(layout, layouts.gptq(weight, v2)), weight)


@GROUPS
def test_awq(group: int) -> None:
    weight = layouts.made(16, 256, 4, group, symmetric=False)
    layout = awq.Awq.read({"bits": 4, "group_size": group, "version": "gemm", "zero_point": True})
    check(unpacked(layout, layouts.awq(weight)), weight)


def scheme(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group,
    }
    if group == -1:
        weights |= {"strategy": "channel", "group_size": None}
    return {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights | more, "targets": ["Linear"]}},
    }


@GROUPS
@BITS
@SYMMETRIC
@pytest.mark.parametrize("ordered", [False, True])
def test_compressed_tensors(group: int, bits: int, symmetric: bool, ordered: bool) -> None:
    weight = layouts.made(16, 256, bits, group, symmetric, shuffled=ordered)
    layout = compressed.Compressed.read(scheme(bits, group, symmetric, actorder="group" if ordered else None))
    check(unpacked(layout, layouts.compressed(weight, symmetric, ordered)), weight)


def test_zero_points_of_outputs_that_do_not_fill_a_word() -> None:
    weight = layouts.made(12, 64, 4, 32, symmetric=False)
    for row in weight.zeros:  # the packing pads columns
        assert len(row) == 2
    padded = [row + [0] * 4 for row in layouts.transposed(weight.zeros)]
    parts = layouts.compressed(weight, symmetric=True)
    parts["weight_zero_point"] = layouts.words(padded, 4).T.contiguous()
    layout = compressed.Compressed.read(scheme(4, 32, symmetric=False))
    found = layout.unpack(parts.__getitem__).dequantized(torch.float64)
    torch.testing.assert_close(found, weight.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("read", "config", "reason"),
    [
        (gptq.Gptq.read, {"bits": 3, "group_size": 128}, "3 bits"),
        (gptq.Gptq.read, {"group_size": 128}, "None bits"),
        (gptq.Gptq.read, {"bits": 4, "group_size": 48}, "groups of 48"),
        (gptq.Gptq.read, {"bits": 4, "group_size": 64, "checkpoint_format": "marlin"}, "'marlin'"),
        (awq.Awq.read, {"bits": 8, "group_size": 64}, "8 bits"),
        (awq.Awq.read, {"bits": 4, "group_size": 64, "version": "gemv"}, "'gemv'"),
        (compressed.Compressed.read, {"format": "pack-quantized"}, "config_groups"),
        (compressed.Compressed.read, scheme(4, 32, True) | {"format": "float-quantized"}, "float-quantized"),
        (compressed.Compressed.read, scheme(4, 32, True, type="float"), "type 'float'"),
        (compressed.Compressed.read, scheme(4, 32, True, strategy="block"), "'block'"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_what_it_says(
    read: Any, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        read(config)


def test_groups_that_do_not_divide_the_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="96 inputs cannot be divided into groups of 64"):
        gptq.Gptq.read({"bits": 4, "group_size": 64}).shapes(16, 96)


def test_groups_of_several_sizes_are_refused() -> None:
    weight = layouts.made(16, 256, 4, 64, symmetric=True)
    weight.groups[0] = 1
    layout = gptq.Gptq.read({"bits": 4, "group_size": 64, "desc_act": True})
    with pytest.raises(ValueError, match="not of one size"):
        layout.check(layouts.gptq(weight, v2=False).__getitem__)
