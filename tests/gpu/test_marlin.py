"""What only a card can show of Marlin: that its products are right as gptqmodel has them, in graphs, too."""

import importlib.util

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.engine.test_int_marlin import symmetric
from worker.engine import packed
from worker.engine.quantize import marlin
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.marlin import MarlinLinear
from worker.engine.quantize.weights import Bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
    pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="no gptqmodel"),
    # Its kernels are compiled when they are first used.
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # of gptqmodel and what it imports
]
GPU = torch.device("cuda")


def layer_on_gpu(
    outputs: int, inputs: int, bits: Bits, group: int, dtype: torch.dtype, ordered: bool = False
) -> IntLinear:
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(0))
    return IntLinear(symmetric(outputs, inputs, bits, group, ordered), bias, dtype).to(GPU)


def rows_of(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(GPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_product_is_what_it_is_taken_for(dtype: torch.dtype, bits: Bits) -> None:
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no bfloat16 on this card")
    assert marlin._fault(GPU, dtype, bits) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 768])
@pytest.mark.parametrize("ordered", [False, True])
def test_few_and_many_rows_are_as_near_as_dequantised_ones(bits: Bits, group: int, ordered: bool) -> None:
    layer = layer_on_gpu(576, 768, bits, group, torch.float16, ordered)
    faster = packed.fastest(layer)
    assert isinstance(faster, MarlinLinear)
    assert layer.bias is not None
    weight = layer.grouped.dequantized(torch.float64)
    for count in (1, 2, 15, 16, 17, 64, 65, 300):
        x = rows_of(count, 768, torch.float16)
        precise = F.linear(x.double(), weight, layer.bias.double())
        theirs, ours = ((each(x) - precise).square().mean().sqrt() for each in (layer, faster))
        assert ours < 2 * theirs


@pytest.mark.parametrize("count", [1, 16, 64, 128])
def test_a_graph_records_it(count: int) -> None:
    layer = packed.fastest(layer_on_gpu(256, 512, 4, 64, torch.float16, ordered=True))
    assert isinstance(layer, MarlinLinear)
    x = rows_of(count, 512, torch.float16)
    with torch.inference_mode():
        expected = layer(x)
        graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
        with torch.cuda.graph(graph):
            found = layer(given)
        given.copy_(x)
        graph.replay()
        assert torch.equal(found, expected)


def test_a_step_does_not_wait_for_the_card() -> None:
    layer = packed.fastest(layer_on_gpu(256, 512, 4, 64, torch.float16))
    x = rows_of(3, 512, torch.float16)
    layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
