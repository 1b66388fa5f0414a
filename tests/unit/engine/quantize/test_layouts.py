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


def reader(parts: dict[str, Tensor]) -> checkpoint.Read:
    """Return what reads one layer's tensors, as that of a checkpoint does."""

    def read(part: str) -> Tensor:
        if part not in parts:
            raise ValueError(part)
        return parts[part]

    return read


def unpacked(layout: checkpoint.Layout, parts: dict[str, Tensor]) -> GroupedWeight:
    shapes = layout.shapes(16, 256)
    assert {part: tuple(parts[part].shape) for part in shapes} == shapes
    layout.check(reader(parts))
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


def rotated(location: str) -> dict[str, Any]:
    apply = {"targets": ["Linear"], "location": location}
    return {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": [apply]}}}}


def test_rotations_that_are_in_the_weights_already_are_nothing_special() -> None:
    found = compressed.Compressed.read(
        scheme(4, 32, True) | rotated("weight_input") | {"sparsity_config": {"format": "dense"}}
    )
    assert found == compressed.Compressed.read(scheme(4, 32, True))


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
        (gptq.Gptq.read, {"bits": 4, "group_size": 64, "format": "marlin"}, "'marlin'"),
        (awq.Awq.read, {"bits": 4, "group_size": 64, "version": "gemv"}, "'gemv'"),
        (awq.Awq.read, {"bits": 4, "group_size": 64, "format": "gemv_fast"}, "'gemv_fast'"),
        (awq.Awq.read, {"bits": 4, "group_size": 64, "checkpoint_format": "gemv"}, "'gemv'"),
        (compressed.Compressed.read, {"format": "pack-quantized"}, "config_groups"),
        (compressed.Compressed.read, scheme(4, 32, True) | {"format": "float-quantized"}, "float-quantized"),
        (compressed.Compressed.read, scheme(4, 32, True, type="float"), "type 'float'"),
        (compressed.Compressed.read, scheme(4, 32, True, strategy="block"), "'block'"),
        (compressed.Compressed.read, scheme(4, 32, True) | rotated("input"), "transform_config"),
        (
            compressed.Compressed.read,
            scheme(4, 32, True) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "'sparse-24-bitmask'",
        ),
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


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([1, *[0] * 63, *[1] * 64, *[2] * 64, *[3] * 64], "not of one size"),
        ([0] * 256, "not of one size"),
        ([i // 32 for i in range(256)], "groups 0 to 7; there are 4"),
        ([-(i // 64) for i in range(256)], "groups -3 to 0; there are 4"),
        ([1 << 30] * 256, "groups 1073741824 to"),
    ],
)
def test_groups_that_are_not_the_scales_are_refused(groups: list[int], reason: str) -> None:
    weight = layouts.made(16, 256, 4, 64, symmetric=True)
    weight.groups = groups
    layout = gptq.Gptq.read({"bits": 4, "group_size": 64, "desc_act": True})
    with pytest.raises(ValueError, match=reason):
        layout.check(reader(layouts.gptq(weight, v2=False)))


def test_an_order_that_the_config_does_not_speak_of_is_refused() -> None:
    ordered, empty = (layouts.made(16, 256, 4, 64, True, shuffled) for shuffled in (True, False))
    empty.groups = [0] * 256  # as some tools leave it
    layout = gptq.Gptq.read({"bits": 4, "group_size": 64, "desc_act": False})
    layout.check(reader(layouts.gptq(empty, v2=False)))
    with pytest.raises(ValueError, match="another order"):
        layout.check(reader(layouts.gptq(ordered, v2=False)))
    packed = compressed.Compressed.read(scheme(4, 64, symmetric=True))
    with pytest.raises(ValueError, match="another order"):
        packed.check(reader(layouts.compressed(ordered, True, ordered=True)))


def test_zero_points_that_the_config_does_not_speak_of_are_refused() -> None:
    weight = layouts.made(16, 256, 4, 64, symmetric=False)
    layout = compressed.Compressed.read(scheme(4, 64, symmetric=True))
    with pytest.raises(ValueError, match="zero points"):
        layout.check(reader(layouts.compressed(weight, symmetric=False)))
