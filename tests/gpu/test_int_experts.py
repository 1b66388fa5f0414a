"""What only a card can show of experts with integers: that a graph records them, and makes the same."""

from typing import Any

import pytest
import torch

from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from worker.engine import EngineConfig, loader, opening, packed
from worker.engine.fast import FastEngine
from worker.engine.quantize import apply
from worker.engine.quantize.int_experts import IntExperts
from worker.engine.quantize.recipe import Recipe
from worker.engine.quantize.tensors import Tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]
GPU = torch.device("cuda")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mixture with integers on the card, in bfloat16 and of sizes that torch's product of 4 bits takes."""
    # With weights of this size a token that changes its expert by rounding does not change all that follows.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.1}
    monkeypatch.setitem(architectures.CONFIGS, "mixtral", architectures.CONFIGS["mixtral"] | sizes)
    made = architectures.build("mixtral").bfloat16().to(GPU)
    apply.quantize(made, Tensors([]), Recipe(4, 64, "rtn"), None)
    return made


@pytest.mark.parametrize("count", [1, 16, 64])
def test_a_graph_records_experts(count: int, model: Any) -> None:
    list(packed.pack_integers(model))
    layer = model.model.layers[0].mlp.experts
    assert isinstance(layer, IntExperts)
    x = torch.randn(count, 128, device=GPU, dtype=torch.bfloat16)
    weights, index = torch.rand(count, 4, device=GPU).topk(2)
    with torch.inference_mode():
        expected = layer(x, index, weights)
        graph, given, chosen = torch.cuda.CUDAGraph(), torch.zeros_like(x), torch.zeros_like(index)
        with torch.cuda.graph(graph):
            found = layer(given, chosen, weights)
        given.copy_(x)
        chosen.copy_(index)
        graph.replay()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_an_engine_runs_a_mixture_by_graphs(model: Any, tiny_loaded: loader.Loaded) -> None:
    pytest.importorskip("flash_attn")  # graphs are of steps over pages
    engine = opening.over(loader.wrap(model, tiny_loaded.tokenizer), EngineConfig(kv_memory_bytes=1 << 26))
    assert isinstance(engine, FastEngine)
    prompts = [[(7 * i * n + i) % 250 for i in range(1, n + 1)] for n in (2, 9, 33, 60)]
    done = list(
        engine.generate([request(str(i), p, max_tokens=8, ignore_eos=True) for i, p in enumerate(prompts)])
    )
    assert [completion.error for completion in done] == [None] * len(prompts)
    assert engine.stats.graphs_recorded > 0
    assert engine.stats.int_fallbacks == 0
    engine.close()
