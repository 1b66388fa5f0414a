"""Checkpoints that come quantised load as what they stand for, or say in one line what is wrong with them."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import errors
from tests.unit.engine.conftest import request
from tests.unit.engine.quantize import checkpoints, layouts
from worker.engine import Engine, EngineConfig, loader
from worker.engine.fast import FastEngine
from worker.engine.quantize.linear import IntLinear

CPU = EngineConfig(device="cpu")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
    "ignore": ["lm_head"],
}
KINDS: dict[str, tuple[dict[str, Any], checkpoints.Pack, dict[str, Any]]] = {
    "gptq": (
        GPTQ,
        lambda weight: layouts.gptq(weight, v2=False),
        {"bits": 4, "group": 32, "symmetric": False, "shuffled": True},
    ),
    "awq": (AWQ, layouts.awq, {"bits": 4, "group": 64, "symmetric": False}),
    "compressed": (
        COMPRESSED,
        lambda weight: layouts.compressed(weight, symmetric=True),
        {"bits": 8, "group": 32, "symmetric": True},
    ),
}


Written = tuple[Path, dict[str, layouts.Quantised]]


@pytest.fixture(scope="module")
def written(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """Return a checkpoint of a kind and what its integers stand for; tests copy it before they change it."""

    def write(kind: str) -> Written:
        config, pack, how = KINDS[kind]
        directory = tmp_path_factory.mktemp("quantised") / "model"
        return directory, checkpoints.write(tiny_path, directory, config, pack, **how)

    return functools.cache(write)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_says_what_generate_says_with_dequantised_weights(
    kind: str, tiny_path: Path, written: Callable[[str], Written]
) -> None:
    directory, made = written(kind)
    reference = checkpoints.dequantised(tiny_path, made)
    engine = Engine.load(str(directory), CPU)
    assert isinstance(engine, FastEngine)
    prompts = [[(11 * i * s + 5) % 250 for i in range(3 * s)] for s in range(1, 6)]
    asked = [request(str(i), ids, max_tokens=20, ignore_eos=True) for i, ids in enumerate(prompts)]
    try:
        found = {done.id: done.token_ids for done in engine.generate(asked)}
    finally:
        engine.close()
    for i, ids in enumerate(prompts):
        assert found[str(i)] == checkpoints.greedy(reference, ids, 20)
    assert len({token for tokens in found.values() for token in tokens}) >= 10


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gptq", "float32"), ("awq", "bfloat16"), ("compressed", "float16")]
)
def test_products_are_those_of_the_checkpoint(
    kind: str, dtype: str, written: Callable[[str], Written]
) -> None:
    directory, made = written(kind)
    model = loader.load(str(directory), EngineConfig(device="cpu", dtype=dtype)).model
    assert not hasattr(model.config, "quantization_config")
    linears = {name: each for name, each in model.named_modules() if isinstance(each, IntLinear)}
    assert linears.keys() == made.keys()
    for name, linear in linears.items():
        weight = linear.grouped.dequantized(torch.float64)
        torch.testing.assert_close(weight, made[name].weight, rtol=1e-6, atol=1e-6)


def without(part: str) -> Any:
    return lambda tensors: tensors.pop(f"model.layers.1.mlp.up_proj.{part}")


def cut(part: str) -> Any:
    def change(tensors: dict[str, Any]) -> None:
        name = f"model.layers.0.self_attn.q_proj.{part}"
        tensors[name] = tensors[name][:1]

    return change


def like(part: str, dtype: torch.dtype) -> Any:
    def change(tensors: dict[str, Any]) -> None:
        name = f"model.layers.0.self_attn.q_proj.{part}"
        tensors[name] = tensors[name].to(dtype)

    return change


def not_finite(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.up_proj.scales"][1, 2] = float("inf")


def another_layer(tensors: dict[str, Any]) -> None:
    tensors["model.layers.7.mlp.up_proj.qweight"] = tensors["model.layers.0.mlp.up_proj.qweight"].clone()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("qzeros"), "has no model.layers.1.mlp.up_proj.qzeros"),
        (without("scales"), "has no model.layers.1.mlp.up_proj.scales"),
        (without("g_idx"), "has no model.layers.1.mlp.up_proj.g_idx"),
        (without("qweight"), "neither model.layers.1.mlp.up_proj.qweight nor"),
        (cut("scales"), "q_proj.scales is .*; the configs make it"),
        (cut("qweight"), "q_proj.qweight is .*; the configs make it"),
        (like("qweight", torch.int16), "q_proj.qweight is I16; I32 is known"),
        (like("qzeros", torch.float32), "q_proj.qzeros is F32; I32 is known"),
        (like("scales", torch.uint8), "q_proj.scales is U8; BF16 or F16 or F32 is known"),
        (like("g_idx", torch.bool), "q_proj.g_idx is BOOL"),
        (not_finite, "up_proj.scales has numbers that are not finite"),
        (another_layer, "no linear layer model.layers.7.mlp.up_proj"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_by_what_is_missing(
    change: Any,
    reason: str,
    written: Callable[[str], Written],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(written("gptq")[0], tmp_path / "model")
    checkpoints.change(tmp_path / "model", change)
    _is_refused(tmp_path / "model", reason, monkeypatch)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPTQ | {"group_size": 64}, "qzeros is .*; the configs make it"),
        (GPTQ | {"bits": 8}, "qweight is .*; the configs make it"),
        (GPTQ | {"bits": 3}, "3 bits"),
        (GPTQ | {"group_size": 128}, "64 inputs cannot be divided into groups of 128"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin' is not known"),
        (AWQ | {"version": "gemv"}, "'gemv' is not known"),
        (COMPRESSED, "has no weight_packed"),
        (COMPRESSED | {"config_groups": ["x"]}, "not as compressed-tensors has it"),
        ({"quant_method": "new", "bits": 4}, "is not known: 'new'"),
        ({"quant_method": ["gptq"]}, r"quant_method .* is \['gptq'\]"),
        ({"bits": 4}, "quant_method .* is None"),
        (COMPRESSED | {"format": "int-quantized"}, "'int-quantized' is not known"),
        ({"quant_method": "longhaul", "version": 2, "bits": 4, "group": 64}, "longhaul 2 is not known"),
    ],
)
def test_a_config_that_is_not_the_checkpoints_is_refused(
    config: dict[str, Any],
    reason: str,
    written: Callable[[str], Written],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(written("gptq")[0], tmp_path / "model")
    checkpoints.set_config(tmp_path / "model", config)
    _is_refused(tmp_path / "model", reason, monkeypatch)


def test_what_is_quantised_is_not_quantised_again(written: Callable[[str], Written]) -> None:
    config = EngineConfig(device="cpu", quantize="int4")
    with pytest.raises(errors.ModelUnavailable, match=r"quantised already \(awq\)"):
        Engine.load(str(written("awq")[0]), config)


def _is_refused(directory: Path, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded before the checkpoint was found to be wrong")

    monkeypatch.setattr("transformers.PreTrainedModel._load_pretrained_model", load)
    with pytest.raises(errors.ModelUnavailable, match=reason) as caught:
        Engine.load(str(directory), CPU)
    assert "\n" not in str(caught.value)
