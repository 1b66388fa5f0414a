"""What is compiled is compiled once for all batch sizes, gives the same tokens, or runs as it is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from worker.engine import EngineConfig, compiling, guards, interface, layer_trial, loader, opening, runner
from worker.engine.merged import MergedLayer
from worker.engine.types import Stats

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def compilations() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.long), "gemma"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_nothing_is_compiled_after_the_model_was_tried(name: str, backend: str) -> None:
    model = architectures.build(name).bfloat16()
    guards.prepare(model, compiler=compiling.Compiler(True, backend))
    assert isinstance(model.model.layers[0], MergedLayer)
    before = compilations()
    functions = 2 if name == "gemma" else 3  # its activation is not the one that is compiled
    assert before == functions * len(compiling.TOKENS)
    for tokens in (1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 65, 200):
        runner.dry_run(model, tokens)
    assert compilations() == before


@pytest.mark.long
def test_tokens_are_the_same_compiled_and_not(tiny_loaded: loader.Loaded) -> None:
    prompts = [[(7 * i * n + i) % 250 for i in range(1, n + 1)] for n in (2, 9, 9, 33, 60)]
    requests = [request(str(i), p, max_tokens=8, ignore_eos=True) for i, p in enumerate(prompts)]
    found = []
    for compile in ("off", "on"):
        model = architectures.build("qwen3")
        config = EngineConfig(compile=compile, kernels="torch")  # type: ignore[arg-type]
        engine = opening.over(loader.wrap(model, tiny_loaded.tokenizer), config)
        assert isinstance(model.model.layers[0], MergedLayer)
        found.append({c.id: c.token_ids for c in engine.generate(requests)})
        assert engine.stats.compile_fallbacks == 0
        engine.close()
    assert compilations() > 0
    assert found[0] == found[1]


def test_what_does_not_compile_runs_as_it_is_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    runs = []

    def stubborn(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        runs.append(1)
        return x + 1

    compiler, stats = compiling.Compiler(True), Stats()
    run = compiler.compiled(stubborn)
    assert torch.equal(run(torch.zeros(3)), torch.ones(3))
    compiler.count_in(stats)
    assert stats.compile_fallbacks == 1
    assert "stubborn runs as it is" in caplog.text
    run(torch.zeros(3))
    compiler.compiled(stubborn)(torch.zeros(3))
    assert stats.compile_fallbacks == 2
    assert len(runs) == 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("short"), MemoryError()])
def test_short_memory_is_no_reason_to_stop_compiling(error: Exception) -> None:
    compiler, stats = compiling.Compiler(True), Stats()
    compiler.count_in(stats)

    def short(graph: object, inputs: object) -> Callable[..., Tensor]:
        def run(*_: object) -> Tensor:
            raise error

        return run

    run = compiling._Compiled(lambda x: x + 1, short, compiler._note)
    with pytest.raises(type(error)):
        run(torch.zeros(3))
    assert stats.compile_fallbacks == 0


def test_auto_compiles_on_no_cpu() -> None:
    assert not compiling.choose("auto", CPU).on
    assert not compiling.choose("off", GPU).on
    assert compiling.choose("on", CPU).on
    with pytest.raises(ValueError, match="compile must be one of"):
        EngineConfig(compile="maybe")  # type: ignore[arg-type]


def test_compiled_layers_keep_their_logits() -> None:
    plain, compiled = (architectures.build("qwen3").bfloat16() for _ in range(2))
    guards.prepare(plain)
    guards.prepare(compiled, compiler=compiling.Compiler(True, "eager"))
    ids = torch.arange(9)[None]
    with torch.inference_mode(), interface.handling(layer_trial.Attending()):
        assert torch.equal(plain(ids, use_cache=False).logits, compiled(ids, use_cache=False).logits)
