"""Products with integers are those with the numbers that these stand for, whatever way computes them."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.engine import grouped
from tests.unit.engine.conftest import native_or_skip
from worker.engine import packed
from worker.engine.native import panels
from worker.engine.packed import PackedGate, PackedLinear
from worker.engine.quantize import linear
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.weights import GroupedWeight

# Outputs around a panel's width and inputs around a block of them, and every number of rows of a tile.
FORMATS = [
    # bits, group, minimum, ordered, dtype of scales, outputs, inputs
    (4, 32, False, False, torch.float32, 49, 576),
    (4, 32, True, False, torch.float16, 130, 96),
    (4, 64, False, True, torch.float16, 47, 704),
    (4, 128, True, False, torch.bfloat16, 96, 256),
    (4, 128, False, False, torch.float32, 1, 128),
    (4, 250, True, False, torch.float16, 24, 250),
    (4, 14, False, True, torch.float32, 48, 14),
    (8, 32, False, False, torch.float16, 49, 576),
    (8, 64, True, True, torch.float32, 25, 192),
    (8, 128, False, True, torch.bfloat16, 130, 384),
    (8, 77, True, False, torch.float32, 51, 77),
    (8, 12, False, False, torch.float16, 13, 132),
]
EACH_FORMAT = pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f[0]}bits-{f[1]}-{f[5]}x{f[6]}")
ROWS = (*range(1, 10), 17, 70)
Format = tuple[int, int, bool, bool, torch.dtype, int, int]


@pytest.fixture(autouse=True)
def _need_kernels() -> None:
    native_or_skip(torch.float32)


def weight_of(format: Format) -> GroupedWeight:
    bits, group, minimum, ordered, dtype, outputs, inputs = format
    return grouped.random_weight(outputs, inputs, bits, group, minimum, ordered, dtype)  # type: ignore[arg-type]


def numbers_of(weight: GroupedWeight) -> Tensor:
    """Return the numbers that integers stand for in float64, one by one from the definition."""
    rows = []
    for packed_row, scales, offsets in zip(weight.packed, weight.scales, weight.offsets, strict=True):
        halves = [(byte & 15, byte >> 4) for byte in packed_row.tolist()]
        integers = list(itertools.chain(*halves)) if weight.bits == 4 else packed_row.tolist()
        row = [0.0] * weight.inputs
        for i, q in enumerate(integers):
            scale, offset = float(scales[i // weight.group]), float(offsets[i // weight.group])
            at = i if weight.order is None else int(weight.order[i])
            row[at] = q * scale + offset if weight.minimum else (q - offset) * scale
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_near(found: Tensor, precise: Tensor) -> None:
    assert found.shape == precise.shape
    bound = 3e-6 * float(precise.abs().max().clamp(min=1))
    assert float((found.double() - precise).abs().max()) <= bound


@EACH_FORMAT
def test_plain_torch_computes_what_the_integers_stand_for(format: Format) -> None:
    weight = weight_of(format)
    bias, x = normal(weight.outputs), normal(5, weight.inputs)
    numbers = numbers_of(weight)
    assert_near(IntLinear(weight, bias)(x), F.linear(x.double(), numbers, bias.double()))
    assert_near(IntLinear(weight)(x[None]), F.linear(x.double(), numbers)[None])
    assert IntLinear(weight, bias, torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


@EACH_FORMAT
def test_every_ending_of_a_product_is_right_for_any_number_of_rows(format: Format) -> None:
    weight = weight_of(format)
    numbers = numbers_of(weight)
    bias, factors = normal(weight.outputs), 1 + normal(weight.inputs) / 10
    plain, biased = PackedLinear(weight), PackedLinear(weight, bias)
    normed, gate = (
        PackedLinear(weight, bias, factors),
        PackedGate(IntLinear(weight), IntLinear(weight, bias), factors),
    )
    for rows in ROWS:
        x, scale, summand = normal(rows, weight.inputs), normal(rows), normal(rows, weight.outputs)
        precise = F.linear(x.double(), numbers)
        assert_near(plain(x), precise)
        assert_near(biased(x, scale), precise * scale[:, None] + bias)
        assert_near(biased.plus(x, summand), precise + bias + summand)
        precise = F.linear(x.double() * factors * scale[:, None], numbers)
        assert_near(normed(x, scale), precise + bias)
        assert_near(gate(x, scale), F.silu(precise) * (precise + bias))


@EACH_FORMAT
def test_a_row_does_not_depend_on_the_rows_beside_it(format: Format) -> None:
    weight = weight_of(format)
    layer = PackedLinear(weight, normal(weight.outputs), normal(weight.inputs))
    x = normal(70, weight.inputs)
    together = layer(x)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), together[:rows])
        assert torch.equal(layer(x[70 - rows :]), together[70 - rows :])


def test_more_rows_than_the_cache_holds_are_right() -> None:
    weight = grouped.random_weight(49, 2048, 4, 64)
    x = normal(200, 2048)
    assert_near(PackedLinear(weight)(x), F.linear(x.double(), numbers_of(weight)))


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    weight = grouped.random_weight(130, 256)
    layer, x = PackedLinear(weight), normal(20, 256)
    sound = layer(x)
    x[7] = torch.nan
    found = layer(x)
    assert bool(found[7].isnan().all())
    others = [row for row in range(20) if row != 7]
    assert torch.equal(found[others], sound[others])


def test_a_large_weight_becomes_numbers_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = grouped.random_weight(130, 256, 8, 64, ordered=True)
    layer, x = IntLinear(weight, normal(130)), normal(2, 3, 256)
    whole = layer(x)
    monkeypatch.setattr(linear, "AT_A_TIME", 40 * 256)
    assert torch.allclose(layer(x), whole, atol=1e-5)


def test_scales_that_are_subnormal_in_half_precision_are_read() -> None:
    weight = grouped.random_weight(48, 32)
    scales = torch.tensor([2.0**-24, 2.0**-15, -(2.0**-20)]).repeat(16)[:, None].half()
    weight = GroupedWeight(weight.packed, scales, torch.zeros_like(scales), 32)
    x = normal(2, 32)
    found, precise = PackedLinear(weight)(x).double(), F.linear(x.double(), numbers_of(weight))
    assert float(((found - precise).abs().amax(0) / precise.abs().amax(0)).max()) < 1e-5


def test_rows_may_lie_anywhere() -> None:
    weight = grouped.random_weight(49, 64)
    layer, plain = PackedLinear(weight), IntLinear(weight)
    wide, tall = normal(9, 90), normal(64, 9)
    for x in (wide[:, 3:67], tall.T, wide[::2, :64], normal(2, 3, 64), wide[:0, :64]):
        assert torch.allclose(layer(x), plain(x), atol=1e-4)


def test_groups_that_no_dword_fits_into_are_left_to_torch() -> None:
    assert not panels.takes(grouped.random_weight(8, 24, 4, 12))
    assert not panels.takes(grouped.random_weight(8, 24, 8, 6))
    model = nn.Sequential(IntLinear(grouped.random_weight(8, 24, 4, 12)))
    assert list(packed.pack_all(model)) == []


@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("ordered", [False, True])
def test_joined_layers_give_the_outputs_of_each(ordered: bool, biases: tuple[bool, bool]) -> None:
    first = grouped.random_weight(40, 64, ordered=ordered)
    second = grouped.random_weight(24, 64)
    second = GroupedWeight(second.packed, second.scales, second.offsets, 32, order=first.order)
    both = [
        IntLinear(weight, normal(weight.outputs) if biased else None)
        for weight, biased in zip((first, second), biases, strict=True)
    ]
    assert linear.can_join(both)
    x = normal(3, 64)
    assert torch.equal(linear.join(both)(x), torch.cat([each(x) for each in both], -1))


@pytest.mark.parametrize(
    "other",
    [
        grouped.random_weight(8, 64, 8),
        grouped.random_weight(8, 64, group=64),
        grouped.random_weight(8, 64, minimum=True),
        grouped.random_weight(8, 64, ordered=True),
        grouped.random_weight(8, 64, dtype=torch.float16),
        grouped.random_weight(8, 32),
    ],
)
def test_layers_of_different_formats_do_not_join(other: GroupedWeight) -> None:
    both = [IntLinear(grouped.random_weight(8, 64)), IntLinear(other)]
    assert not linear.can_join(both)
    assert not linear.can_join(both[::-1])


def test_orders_that_differ_do_not_join() -> None:
    ones = [IntLinear(grouped.random_weight(outputs, 64, ordered=True)) for outputs in (8, 9)]
    assert not linear.can_join(ones)


def test_another_dtype_leaves_scales_as_they_are() -> None:
    layer = IntLinear(grouped.random_weight(8, 64), normal(8))
    x = normal(3, 64)
    expected = layer(x)
    there_and_back = copy.deepcopy(layer).half().float()
    assert there_and_back.grouped.scales.dtype == torch.float32
    there_and_back.bias = layer.bias
    assert torch.equal(there_and_back(x), expected)
    assert copy.deepcopy(layer).double()(x.double()).dtype == torch.float64
