"""What only a card can show of integers: torch's own product of 4 bits, and that graphs can record it."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.engine import architectures, grouped, int4_standin
from tests.unit.engine.conftest import request
from worker.engine import EngineConfig, guards, interface, loader, opening, runner
from worker.engine.compiling import Compiler
from worker.engine.fast import FastEngine
from worker.engine.merged import MergedLayer
from worker.engine.quantize import tiles
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.tiles import TiledLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _need_bfloat16() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no product of 4 bits on this card")


def layer_on_gpu(outputs: int, inputs: int, group: int, ordered: bool = False) -> IntLinear:
    weight = grouped.random_weight(outputs, inputs, 4, group, ordered=ordered)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(0))
    return IntLinear(weight, bias, torch.bfloat16).to(GPU)


def rows_of(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(GPU, torch.bfloat16)


def test_the_product_is_what_it_is_taken_for() -> None:
    assert tiles._fault(GPU) is None


def test_the_stand_in_makes_the_tiles_of_the_card() -> None:
    weight = torch.randint(0, 256, (64, 192), dtype=torch.uint8)
    theirs = torch.ops.aten._convert_weight_to_int4pack(weight.to(GPU), 8).cpu()
    assert torch.equal(int4_standin.convert(weight, 8), theirs)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("shape", [(8, 256), (576, 768), (3072, 1536)])
@pytest.mark.parametrize("ordered", [False, True])
def test_few_and_many_rows_are_as_near_as_dequantised_ones(
    group: int, shape: tuple[int, int], ordered: bool
) -> None:
    layer = layer_on_gpu(*shape, group, ordered)
    tiled = TiledLinear(layer.grouped, layer.bias)
    weight = layer.grouped.dequantized(torch.float64)
    assert layer.bias is not None
    for count in (1, 2, 15, 16, 17, 64, 65, 300):
        x = rows_of(count, shape[1])
        precise = F.linear(x.double(), weight, layer.bias.double())
        theirs, ours = ((each(x) - precise).square().mean().sqrt() for each in (layer, tiled))
        assert ours < 2 * theirs


@pytest.mark.parametrize("count", [1, 16, 64, 128])
def test_a_graph_records_it(count: int) -> None:
    layer = layer_on_gpu(256, 512, 64, ordered=True)
    tiled, x = TiledLinear(layer.grouped, layer.bias), rows_of(count, 512)
    with torch.inference_mode():
        expected = tiled(x)
        graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
        with torch.cuda.graph(graph):
            found = tiled(given)
        given.copy_(x)
        graph.replay()
        assert torch.equal(found, expected)


def test_a_card_does_not_hold_the_integers_of_all_layers_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 16}
    monkeypatch.setitem(architectures.CONFIGS, "qwen3", architectures.CONFIGS["qwen3"] | sizes)
    model = grouped.quantize(architectures.build("qwen3").bfloat16()).to(GPU)
    weights = sum(each.grouped.nbytes for each in model.modules() if isinstance(each, IntLinear))
    ids = torch.tensor([[5, 6, 7]], device=GPU)
    with torch.inference_mode():
        expected = model(ids).logits
    model.set_attn_implementation(interface.NAME)
    ready, replaced, held = runner.ModelRunner(model, "dense"), [], []
    before = torch.cuda.memory_allocated()
    for each in guards._fuse_and_pack(model, ready, Compiler()):
        replaced.append(each)
        held.append(torch.cuda.memory_allocated() - before)
    assert len(replaced) == 16
    assert max(held) < weights / 4
    for parent, name, module in replaced:
        setattr(parent, name, module.to(GPU))
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(("dtype", "plain"), [(torch.bfloat16, 0), (torch.float16, 8)])
def test_an_engine_runs_integers_and_counts_those_that_are_dequantised(
    dtype: torch.dtype, plain: int, tiny_loaded: loader.Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    monkeypatch.setitem(architectures.CONFIGS, "qwen3", architectures.CONFIGS["qwen3"] | sizes)
    model = grouped.quantize(architectures.build("qwen3").to(dtype)).to(GPU)
    config = EngineConfig(kv_memory_bytes=1 << 26)
    engine = opening.over(loader.wrap(model, tiny_loaded.tokenizer), config)
    assert isinstance(engine, FastEngine)
    assert all(isinstance(layer, MergedLayer) for layer in model.model.layers)
    assert engine.stats.int_fallbacks == plain
    prompts = [[(7 * i * n + i) % 250 for i in range(1, n + 1)] for n in (2, 9, 33, 60)]
    done = list(
        engine.generate([request(str(i), p, max_tokens=8, ignore_eos=True) for i, p in enumerate(prompts)])
    )
    assert [completion.error for completion in done] == [None] * len(prompts)
    engine.close()
