"""Packed products are torch's, at every edge of a tile, and a row's result is its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker.engine.native import library
from worker.engine.packed import PackedGate, PackedLinear

ROWS = (*range(1, 10), 17, 64, 300)
INPUTS = (1, 7, 768, 769, 1600)
OUTPUTS = (1, 47, 48, 49, 130)
DTYPES = (torch.float32, torch.float64)
SHAPES = pytest.mark.parametrize(
    ("inputs", "outputs", "dtype"),
    [
        pytest.param(i, o, dtype, marks=() if n == m else pytest.mark.long)
        for n, i in enumerate(INPUTS)
        for m, o in enumerate(OUTPUTS)
        for dtype in DTYPES
    ],
)


@pytest.fixture(autouse=True)
def _need_kernels() -> None:
    if library.kernels(torch.float32, torch.device("cpu")) is None:
        pytest.skip("no compiled kernels on this machine")


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers, the same at every call."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def check(found: Tensor, wanted: Callable[[torch.dtype], Tensor]) -> None:
    """Compare with what torch makes of the same numbers in float64."""
    precise = wanted(torch.float64)
    bound = {torch.float32: 2e-5, torch.float64: 1e-12}[found.dtype] * precise.abs().max().clamp(min=1)
    assert found.shape == precise.shape
    assert float((found.double() - precise).abs().max()) <= bound


def scaled(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if scale is None else x.to(dtype) * scale.to(dtype)[:, None]


@SHAPES
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_that_of_torch(inputs: int, outputs: int, dtype: torch.dtype, biased: bool) -> None:
    weight = normal(outputs, inputs, dtype=dtype)
    bias = normal(outputs, dtype=dtype) if biased else None
    layer = PackedLinear(weight, bias)
    for rows in ROWS:
        x, scale = normal(rows, inputs, dtype=dtype), normal(rows, dtype=dtype)
        summand = normal(rows, outputs, dtype=dtype)

        def linear(
            dtype: torch.dtype, scale: Tensor | None = None, x: Tensor = x, add: Tensor | None = None
        ) -> Tensor:
            y = F.linear(scaled(x, scale, dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
            return y if add is None else y + add.to(dtype)

        check(layer(x), linear)
        check(layer(x, scale), lambda dtype, scale=scale, f=linear: f(dtype, scale))
        check(layer.plus(x, summand), lambda dtype, add=summand, f=linear: f(dtype, add=add))


@SHAPES
@pytest.mark.parametrize("biases", [(False, False), (True, True), (False, True)])
def test_a_gate_is_that_of_torch(
    inputs: int, outputs: int, dtype: torch.dtype, biases: tuple[bool, bool]
) -> None:
    layers = [nn.Linear(inputs, outputs, bias, dtype=dtype) for bias in biases]
    norm = 1 + normal(inputs, dtype=dtype) / 10
    gate = PackedGate(layers[0], layers[1], norm)
    with torch.inference_mode():
        for rows in ROWS:
            x, scale = normal(rows, inputs, dtype=dtype), normal(rows, dtype=dtype)

            def wanted(dtype: torch.dtype, x: Tensor = x, scale: Tensor = scale) -> Tensor:
                x = scaled(x, scale, dtype) * norm.to(dtype)
                sides = [
                    F.linear(x, each.weight.to(dtype), None if each.bias is None else each.bias.to(dtype))
                    for each in layers
                ]
                return F.silu(sides[0]) * sides[1]

            check(gate(x, scale), wanted)


@SHAPES
def test_a_row_does_not_depend_on_the_rows_beside_it(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    layer = PackedLinear(normal(outputs, inputs, dtype=dtype), normal(outputs, dtype=dtype))
    gate = PackedGate(
        nn.Linear(inputs, outputs, dtype=dtype),
        nn.Linear(inputs, outputs, dtype=dtype),
        torch.ones(inputs, dtype=dtype),
    )
    x, scale = normal(300, inputs, dtype=dtype), normal(300, dtype=dtype)
    summand = normal(300, outputs, dtype=dtype)
    with torch.inference_mode():
        for compute in (
            lambda at: layer(x[at], scale[at]),
            lambda at: layer.plus(x[at], summand[at]),
            lambda at: gate(x[at], scale[at]),
        ):
            together = compute(slice(64))
            for rows in ROWS:
                others = compute(slice(rows))
                assert torch.equal(others[: min(rows, 64)], together[:rows])
            for row in (1, 31, 63):
                assert torch.equal(compute(slice(row, row + 1))[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_anywhere(dtype: torch.dtype) -> None:
    weight = normal(49, 40, dtype=dtype)
    layer = PackedLinear(weight)
    wide, tall = normal(9, 90, dtype=dtype), normal(40, 9, dtype=dtype)
    for x in (wide[:, 3:43], tall.T, wide[::2, :40], normal(2, 3, 40, dtype=dtype), wide[:0, :40]):
        assert torch.allclose(layer(x), F.linear(x, weight), atol=1e-4)
    x = wide[:, :40]
    assert torch.allclose(layer.plus(x, wide[0, :49]), F.linear(x, weight) + wide[0, :49], atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_not_finite_stay_in_their_row(dtype: torch.dtype) -> None:
    layer = PackedLinear(normal(130, 769, dtype=dtype))
    x = normal(20, 769, dtype=dtype)
    sound = layer(x)
    x[7], x[12, 5] = torch.nan, torch.inf
    found = layer(x)
    assert bool(found[7].isnan().all())
    assert not bool(found[12].isfinite().any())
    others = [row for row in range(20) if row not in (7, 12)]
    assert torch.equal(found[others], sound[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 576, 1600])
def test_the_inverse_rms_is_that_of_torch(size: int, dtype: torch.dtype) -> None:
    kernels = library.kernels(dtype, torch.device("cpu"))
    assert kernels is not None
    for rows in (1, 2, 9, 64):
        x = normal(rows, size + 3, dtype=dtype)[:, :size]
        check(
            kernels.inverse_rms(x, 1e-5),
            lambda dtype, x=x: (x.to(dtype).square().mean(1) + 1e-5).rsqrt(),
        )
