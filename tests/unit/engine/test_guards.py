"""What the guards refuse runs in transformers' `generate`, is counted and logged, and is right."""

from pathlib import Path

import pytest
import torch

from jobs import errors
from tests.unit.engine import architectures, exactness
from tests.unit.engine.conftest import request
from worker.engine import Engine, EngineConfig, loader, opening
from worker.engine.fallback import FallbackEngine

EVERYDAY = ("falcon", "xglm", "bloom", "mamba", "jamba", "qwen3_next")
PROMPTS = [[(7 * i * n + i) % 250 for i in range(1, n + 1)] for n in (2, 9, 9, 33, 60)]
NAMES = [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.long) for n in architectures.FALL_BACK]


def check_falls_back(engine: Engine, name: str, log: str) -> None:
    """Check which engine it is, that it says so, and that its tokens are those of `generate`; close it."""
    try:
        assert isinstance(engine, FallbackEngine)
        assert engine.stats.fallbacks == 1
        assert "fallback" in log
        requests = [request(str(i), p, max_tokens=6 + i, ignore_eos=True) for i, p in enumerate(PROMPTS)]
        done = {completion.id: completion for completion in engine.generate(requests)}
        assert [completion.error for completion in done.values()] == [None] * len(requests)
        exactness.check(name, requests, exactness.tokens_of(done))
        assert exactness.reference(name).vary()
    finally:
        engine.close()


@pytest.mark.parametrize("name", NAMES)
def test_what_the_guards_refuse_falls_back_and_is_right(
    name: str, tiny_loaded: loader.Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = loader.wrap(architectures.build(name), tiny_loaded.tokenizer)
    check_falls_back(opening.over(loaded, EngineConfig(max_running=4)), name, caplog.text)


@pytest.mark.parametrize("name", ["falcon", "mamba"])
def test_a_model_opened_from_its_files_falls_back_and_is_right(
    name: str, tiny_loaded: loader.Loaded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    architectures.build(name).save_pretrained(tmp_path)
    tiny_loaded.tokenizer.save_pretrained(tmp_path)
    engine = opening.open_model(str(tmp_path), EngineConfig(device="cpu", dtype="float64"))
    check_falls_back(engine, name, caplog.text)


@pytest.mark.parametrize(
    ("name", "reason"), [("llama", "needs a CUDA device"), ("falcon", "the fast engine cannot run the model")]
)
def test_who_asks_for_flash_attn_and_cannot_have_it_is_refused(
    name: str, reason: str, tiny_loaded: loader.Loaded, tmp_path: Path
) -> None:
    architectures.build(name).to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_loaded.tokenizer.save_pretrained(tmp_path)
    config = EngineConfig(device="cpu", dtype="bfloat16", attention="flash")
    with pytest.raises(errors.ModelUnavailable, match=f"LONGHAUL_ATTENTION=flash: .*{reason}"):
        opening.open_model(str(tmp_path), config)


def test_a_model_that_passes_the_guards_does_not_fall_back(tiny_loaded: loader.Loaded) -> None:
    engine = opening.over(loader.wrap(architectures.build("llama"), tiny_loaded.tokenizer), EngineConfig())
    assert engine.stats.fallbacks == 0
    engine.close()
