"""Rounding by a model's outputs beats rounding to the nearest, in what it is for."""

import pytest
import torch
from torch import Tensor

from worker.engine.quantize import calibrate, rounding
from worker.engine.quantize.recipe import Recipe
from worker.engine.quantize.weights import Bits, GroupedWeight

BITS = pytest.mark.parametrize("bits", [4, 8])


@pytest.fixture(scope="module")
def layer() -> tuple[Tensor, Tensor]:
    """A weight [96, 128], and inputs [500, 128] some of which are large and most of which go together."""
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=chance) * 0.02
    mixed = torch.randn(500, 16, generator=chance) @ torch.randn(16, 128, generator=chance)
    return weight, (mixed + torch.randn(500, 128, generator=chance)) * torch.logspace(-1, 1, 128)


def output_error(found: GroupedWeight, weight: Tensor, x: Tensor) -> float:
    return float((x @ (found.dequantized() - weight).T).square().mean().sqrt())


@BITS
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_nearest_is_at_most_half_a_step_away(
    bits: Bits, group: int, layer: tuple[Tensor, Tensor]
) -> None:
    weight, _ = layer
    found = rounding.nearest(weight, bits, group)
    steps = found.scales.float().repeat_interleave(group, 1)
    assert ((found.dequantized() - weight).abs() <= 0.51 * steps + 1e-4).all()
    assert (found.bits, found.group, found.minimum) == (bits, group, True)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_errors_of_outputs_shrink_by_what_is_known_of_inputs(
    group: int, layer: tuple[Tensor, Tensor]
) -> None:
    weight, x = layer
    inputs = calibrate.Inputs(x)
    nearest = output_error(rounding.nearest(weight, 4, group), weight, x)
    weighted = output_error(rounding.searched(weight, inputs.importance, 4, group), weight, x)
    compensated = output_error(calibrate.calibrated(weight, inputs, 4, group), weight, x)
    assert weighted < 0.9 * nearest
    assert compensated < 0.9 * weighted


def test_what_4_bits_and_a_minimum_can_say_stays_as_it_is(layer: tuple[Tensor, Tensor]) -> None:
    chance = torch.Generator().manual_seed(1)
    integers = torch.randint(0, 16, (96, 4, 32), generator=chance).float()
    integers[..., 0], integers[..., 1] = 0, 15
    scale = (torch.rand(96, 4, 1, generator=chance) * 0.01 + 0.001).half().float()
    minimum = (-8 * scale).half().float()
    weight = (integers * scale + minimum).flatten(1)
    inputs = calibrate.Inputs(layer[1])
    for found in (
        rounding.nearest(weight, 4, 32),
        rounding.searched(weight, inputs.importance, 4, 32),
        calibrate.calibrated(weight, inputs, 4, 32),
    ):
        torch.testing.assert_close(found.dequantized(), weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.3, -7.0])
def test_a_weight_of_one_value_stays_that_value(value: float) -> None:
    weight = torch.full((4, 64), value)
    inputs = calibrate.Inputs(torch.eye(64))
    for found in (
        rounding.nearest(weight, 4, 32),
        rounding.searched(weight, inputs.importance, 4, 32),
        calibrate.calibrated(weight, inputs, 4, 32),
    ):
        torch.testing.assert_close(found.dequantized(), weight, rtol=1e-3, atol=1e-6)


def test_inputs_that_are_always_zero_do_no_harm(layer: tuple[Tensor, Tensor]) -> None:
    weight, x = layer[0], layer[1].clone()
    x[:, 32:96] = 0
    inputs = calibrate.Inputs(x)
    for found in (
        rounding.searched(weight, inputs.importance, 4, 32),
        calibrate.calibrated(weight, inputs, 4, 32),
    ):
        assert output_error(found, weight, x) < output_error(rounding.nearest(weight, 4, 32), weight, x)


def test_a_group_is_the_largest_that_divides_the_inputs() -> None:
    assert [Recipe(4, 128).group_of(inputs) for inputs in (1536, 576, 96, 40)] == [128, 64, 32, None]
