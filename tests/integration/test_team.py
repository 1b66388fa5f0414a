"""Tensor parallelism between two real processes on the CPU: the same numbers, and an end when one fails."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration import paged_steps, team_process, two_ranks
from tests.unit.engine import architectures
from worker.engine import EngineConfig, loader, tiny
from worker.engine.fast import FastEngine

_MODELS = ("llama-float64", "llama-float32", "qwen3-float64", "tied-float64", "qwen3_moe-float32")
_LONG = pytest.mark.long
_TOLERANCE = {"float64": 1e-5, "float32": 1e-3}  # the norms of most models are taken in float32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of tiny models by their names."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(tiny.tiny_model(root / "tiny"))
    for name in _MODELS:
        kind = name.split("-")[0]
        model = architectures.build("qwen3" if kind == "tied" else kind)
        if kind == "tied":
            model.config.tie_word_embeddings = True
            model.tie_weights()
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in _MODELS}


@pytest.fixture(scope="module")
def computed(models: dict[str, Path]) -> None:
    """Have two ranks compute what the tests compare."""
    for code, output in two_ranks.run("same", *(str(models[name]) for name in _MODELS)):
        assert code == 0, output


@pytest.mark.usefixtures("computed")
def test_steps_of_two_ranks_give_the_logits_of_one(models: dict[str, Path]) -> None:
    for name in _MODELS:
        layers, led = torch.load(models[name] / "led.pt")
        assert layers == ((1, 8, 8),) * 2, f"{name}: a rank has one of two KV heads"
        alone = _alone(models[name], name.split("-")[1])
        assert led.dtype == alone.dtype
        gap = float((led - alone).abs().max() / alone.std())
        assert gap < _TOLERANCE[name.split("-")[1]], name
        assert len({int(row.argmax()) for row in led}) > 3


@pytest.mark.usefixtures("computed")
def test_an_engine_over_two_ranks_chooses_the_tokens_of_one(models: dict[str, Path]) -> None:
    path = models[_MODELS[0]]
    loaded = loader.load(str(path), EngineConfig(dtype="float64"))
    engine = FastEngine.over(loaded, EngineConfig())
    try:
        alone = team_process.run(engine)
    finally:
        engine.close()
    assert json.loads((path / "tokens.json").read_text()) == alone
    assert len({token for tokens in alone.values() for token in tokens}) >= 10


def _alone(path: Path, dtype: str) -> torch.Tensor:
    """Return the logits of transformers' own code in one process, without pages or a cache."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        rows = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in paged_steps.sequences()]
    return torch.stack(rows)


@pytest.mark.parametrize("how", ["die", *(pytest.param(how, marks=_LONG) for how in ("raise", "hang"))])
def test_a_rank_that_fails_ends_the_step_of_rank_0(models: dict[str, Path], how: str) -> None:
    ((code, output),) = two_ranks.run(how, str(models["llama-float64"]), waits_for=1)
    assert code == team_process.FAILED, output
    assert "in a step that the other ranks run on" in output


@_LONG
def test_a_step_that_fails_on_rank_0_alone_is_no_error_to_try_again(models: dict[str, Path]) -> None:
    (code, output), (follower, _) = two_ranks.run("alone", str(models["llama-float64"]))
    assert code == team_process.FAILED, output
    assert follower not in (0, None), "a rank that lost rank 0 went on"
