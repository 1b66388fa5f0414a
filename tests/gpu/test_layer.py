"""What only a card can show of layers: its attention kernel, compiled parts, and rounding."""

from statistics import median

import pytest
import torch

from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from tests.unit.engine.test_merged import PROMPTS, logits
from worker.engine import compiling, guards, interface, layer_trial, runner, sdpa
from worker.engine.fast import FastEngine
from worker.engine.loader import Loaded
from worker.engine.merged import MergedLayer
from worker.engine.types import EngineConfig, Stats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
]
GPU = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (320, 320), (512, 512)])
def test_the_attention_kernel_is_what_it_is_taken_for(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no bfloat16 on this card")
    k, v = (torch.zeros(1, 2, 8, size, dtype=dtype, device=GPU) for size in sizes)
    assert sdpa.serves(k, v)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
@pytest.mark.parametrize("compile", ["off", "on"])
def test_logits_are_as_near_to_the_truth_as_by_the_models_own_code(name: str, compile: str) -> None:
    own = architectures.build(name).to(GPU, torch.float16)
    exact, ours = architectures.build(name).half().double(), architectures.build(name).to(GPU, torch.float16)
    compiler, stats = compiling.choose(compile, GPU), Stats()  # type: ignore[arg-type]
    guards.prepare(ours, compiler=compiler)
    compiler.count_in(stats)
    assert stats.compile_fallbacks == 0
    assert all(isinstance(layer, MergedLayer) for layer in ours.model.layers)
    ratios = []
    for ids in PROMPTS:
        truth = logits(exact, ids)
        with torch.inference_mode(), interface.handling(layer_trial.Attending()):
            found = ours(input_ids=torch.tensor([ids], device=GPU), use_cache=False).logits[0].double().cpu()
        with torch.inference_mode():
            theirs = own(input_ids=torch.tensor([ids], device=GPU), use_cache=False).logits[0].double().cpu()
        gaps = [float((each - truth).square().mean().sqrt()) for each in (theirs, found)]
        ratios.append(gaps[1] / gaps[0])
    assert median(ratios) < 1.1


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
def test_the_dense_backend_is_the_reference(name: str, tiny_loaded: Loaded) -> None:
    found = {}
    for backend in ("dense", "reference"):
        model = architectures.build(name).to(GPU, torch.float32)
        loaded = Loaded(model, tiny_loaded.tokenizer, 512, 259, frozenset(), 0, GPU)
        budget = 1 << 26
        engine = FastEngine(loaded, EngineConfig(kv_memory_bytes=budget), guards.prepare(model, backend))
        prompts = [[(7 * i * n + i) % 250 for i in range(1, n + 1)] for n in (2, 9, 9, 33, 60)]
        requests = [request(str(i), p, max_tokens=8, ignore_eos=True) for i, p in enumerate(prompts)]
        found[backend] = {c.id: c.token_ids for c in engine.generate(requests)}
        engine.close()
    assert found["dense"] == found["reference"]


def test_nothing_is_compiled_after_the_model_was_tried() -> None:
    from torch._dynamo.utils import counters

    model = architectures.build("qwen3").to(GPU, torch.float16)
    guards.prepare(model, compiler=compiling.Compiler(True))
    before = counters["stats"]["unique_graphs"]
    for tokens in (1, 2, 3, 16, 64, 65, 200):
        runner.dry_run(model, tokens)
    assert counters["stats"]["unique_graphs"] == before > 0
