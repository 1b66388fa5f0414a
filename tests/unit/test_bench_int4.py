"""The benchmark of quantised weights measures what it says."""

import math
from pathlib import Path

import pytest
import torch

from bench import int4, int4_quality
from worker.engine import EngineConfig, loader
from worker.engine.tiny import tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.quantize.cache.directory", lambda: tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_perplexity_is_of_all_tokens_but_the_first(tiny: Path) -> None:
    model = loader.load(str(tiny), EngineConfig(device="cpu")).model
    ids = [(7 * i * i + 3 * i) % 250 for i in range(513)]
    window = torch.tensor([ids[:512]])
    with torch.inference_mode():
        loss = model(window, labels=window).loss
    assert int4_quality.perplexity(model, ids, 511) == pytest.approx(math.exp(float(loss)), rel=1e-5)


def test_a_model_agrees_with_itself(tiny: Path) -> None:
    loaded = loader.load(str(tiny), EngineConfig(device="cpu"))
    prompt = [5, 6, 7, 8]
    said = int(loaded.model(torch.tensor([prompt])).logits[0, -1].argmax())
    assert int4_quality.agreement(loaded.model, [(prompt, [said])])["greedy_agreement"] == 1
    assert int4_quality.agreement(loaded.model, [(prompt, [said + 1])])["greedy_agreement"] == 0


def test_the_bytes_of_a_group_are_those_that_are_promised(tiny: Path) -> None:
    for group, most in ((32, 0.32), (64, 0.30)):
        config = EngineConfig(device="cpu", quantize="int4", quantize_group=group, quantize_method="rtn")
        model = loader.load(str(tiny), config).model
        assert int4_quality.linear_bytes_ratio(model) <= most


@pytest.mark.long
def test_what_is_measured_is_not_what_is_calibrated_by() -> None:
    measured, held_out = int4_quality.docstrings()
    assert len(measured) > 50_000 * 4
    assert not set(measured.split("\n\n")[:20]) & set(held_out.split("\n\n"))


def test_the_default_is_what_the_setting_takes() -> None:
    with int4.subject("int4", int4._DEFAULT_GROUP, "source", "") as found:
        assert found.config == EngineConfig(
            device="cpu", dtype="float32", kv_memory_bytes=1 << 30, quantize="int4"
        )
