from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jobs import errors
from tests.unit.engine import architectures
from worker.engine import EngineConfig, footprint, guards, runner

_CONFIG = EngineConfig(max_running=4, prefill_chunk_tokens=16)


def _meta(name: str, dtype: torch.dtype = torch.float64) -> Any:
    config = AutoConfig.for_model(name, **architectures.CONFIGS[name])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "mixtral", "gpt_oss", "gemma2", "gpt2"])
def test_what_is_learnt_without_weights_is_what_the_loaded_model_has(name: str) -> None:
    found = footprint.of_model(_meta(name, torch.bfloat16), _CONFIG, dtype=torch.float64)
    model = architectures.build(name)
    weights = sum(p.nbytes for p in model.parameters())
    assert weights <= found.weight_bytes <= 1.01 * weights, "some parameters and buffers are always wider"
    assert found.parameters == sum(p.numel() for p in model.parameters())
    layout = guards.prepare(model).layout
    assert found.layout.layers == layout.layers
    assert found.token_bytes == layout.token_bytes


def test_a_forward_on_the_cpu_holds_what_the_meta_device_says() -> None:
    def step_of(model: Any) -> int:
        model.set_attn_implementation("longhaul")
        return footprint.peak_bytes(lambda: footprint._forward(model, footprint._Attention(), 20, 4))

    assert step_of(architectures.build("qwen3")) == step_of(_meta("qwen3")) > 0


def test_a_larger_chunk_holds_more() -> None:
    small, large = (
        footprint.of_model(_meta("llama"), EngineConfig(max_running=1, prefill_chunk_tokens=tokens))
        for tokens in (64, 1024)
    )
    assert large.step_bytes > 8 * small.step_bytes
    assert large.decode_bytes == small.decode_bytes


def test_cards_that_share_a_model_have_a_part_of_what_is_divided() -> None:
    whole, half = (footprint.of_model(_meta("llama"), _CONFIG, cards) for cards in (1, 2))
    assert half.token_bytes * 2 == whole.token_bytes
    model = _meta("llama")
    norms = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name)
    rotary = sum(b.nbytes for b in model.buffers())
    assert half.weight_bytes == (whole.weight_bytes - norms - rotary) // 2 + norms + rotary


def test_heads_that_cards_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="2 KV heads cannot be divided among 3 cards"):
        footprint.of_model(_meta("llama"), _CONFIG, 3)


def test_a_model_that_the_fast_engine_does_not_run_is_refused_with_the_reason() -> None:
    with pytest.raises(guards.Unsupported, match="layers of kind"):
        footprint.of_model(_meta("mamba"), _CONFIG)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}', "quantised .fp8., and"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 3}}', "3 bits"),
        ('{"model_type": "nobodys"}', "nobodys"),
        ('{"model_type": ', "config.json"),
        ("{}", "model_type"),
        ('{"model_type": "bert"}', "not causal"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused_in_one_line(
    tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(errors.ModelUnavailable, match=reason) as error:
        footprint.of_source(str(tmp_path), _CONFIG, None)
    assert "\n" not in str(error.value)


def test_the_dtype_is_the_models_own_half_precision_unless_asked_otherwise(tmp_path: Path) -> None:
    def dtype(own: str, asked: torch.dtype | None = None) -> torch.dtype:
        AutoConfig.for_model("llama", **architectures.CONFIGS["llama"], dtype=own).save_pretrained(tmp_path)
        return footprint.of_source(str(tmp_path), _CONFIG, asked).dtype

    assert dtype("float16") == torch.float16
    assert dtype("bfloat16") == dtype("float32") == torch.bfloat16
    assert dtype("float16", torch.float32) == torch.float32


def test_the_runner_learns_layers_without_a_device() -> None:
    assert runner.ModelRunner(_with_ours(_meta("llama"))).layout.device.type == "meta"


def _with_ours(model: Any) -> Any:
    model.set_attn_implementation("longhaul")
    return model
