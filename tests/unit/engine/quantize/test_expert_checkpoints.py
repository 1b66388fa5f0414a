"""Mixtures that come quantised have a linear layer for each expert, which load as the model has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import errors
from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from tests.unit.engine.quantize import checkpoints, layouts, mixtures
from tests.unit.engine.quantize.test_checkpoint import COMPRESSED, GPTQ
from worker.engine import Engine, EngineConfig, loader
from worker.engine.fast import FastEngine
from worker.engine.quantize.int_experts import IntExperts

CPU = EngineConfig(device="cpu")
IN_ORDER = GPTQ | {"desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
PLAIN: dict[str, Any] = {"bits": 4, "group": 32, "symmetric": False}


def gptq(weight: layouts.Quantised) -> dict[str, torch.Tensor]:
    return layouts.gptq(weight, v2=False)


def reordered(weight: layouts.Quantised) -> dict[str, torch.Tensor]:
    """Have weights with as many inputs take them in one order, as those do that see the same rows."""
    count = len(weight.groups)
    weight.groups = [i % (count // 32) for i in range(count)]
    return gptq(weight)


def compressed(weight: layouts.Quantised) -> dict[str, torch.Tensor]:
    return layouts.compressed(weight, symmetric=True)


Kind = tuple[str, dict[str, Any], checkpoints.Pack, dict[str, Any]]
KINDS: dict[str, Kind] = {
    "gptq": ("mixtral", IN_ORDER, gptq, PLAIN),
    "act-order": ("mixtral", GPTQ, reordered, PLAIN),
    "awq": ("qwen3_moe", AWQ, layouts.awq, PLAIN),
    "compressed": ("qwen2_moe", COMPRESSED, compressed, PLAIN | {"bits": 8, "symmetric": True}),
}
Written = tuple[Path, Path, dict[str, layouts.Quantised]]


@pytest.fixture
def written(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Written]:
    """Write a mixture, and one with quantised weights in place of its own; return both and these.

    What goes into an expert has two groups, whose order then matters.
    """

    def write(name: str, config: dict[str, Any], pack: checkpoints.Pack, how: dict[str, Any]) -> Written:
        sizes = architectures.CONFIGS[name] | {"hidden_size": 64}
        monkeypatch.setitem(architectures.CONFIGS, name, sizes)
        source = mixtures.write(name, tiny_path, tmp_path / "whole")
        made = checkpoints.write(source, tmp_path / "model", config, pack, **how)
        return source, tmp_path / "model", made

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_says_what_generate_says_with_the_weights_of_the_checkpoint(
    kind: str, written: Callable[..., Written], tmp_path: Path
) -> None:
    source, directory, made = written(*KINDS[kind])
    assert sum(".experts." in name for name in made) == 2 * 4 * 3
    whole = mixtures.dequantised(source, tmp_path / "reference", made)
    engine = Engine.load(str(directory), CPU)
    assert isinstance(engine, FastEngine)
    prompts = [[(11 * i * s + 5) % 250 for i in range(3 * s)] for s in range(1, 5)]
    asked = [request(str(i), ids, max_tokens=12, ignore_eos=True) for i, ids in enumerate(prompts)]
    try:
        found = {done.id: done.token_ids for done in engine.generate(asked)}
    finally:
        engine.close()
    assert found == {str(i): checkpoints.greedy(whole, ids, 12) for i, ids in enumerate(prompts)}
    assert len({token for ids in found.values() for token in ids}) >= 10


def refused(directory: Path) -> str:
    with pytest.raises(errors.ModelUnavailable) as caught:
        loader.load(str(directory), CPU)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_experts_with_inputs_in_two_orders_are_refused_in_one_line(written: Callable[..., Written]) -> None:
    _, directory, _ = written("qwen3_moe", GPTQ, gptq, PLAIN | {"shuffled": True})
    reason = refused(directory)
    assert "mlp.experts.0.gate_proj and model.layers.0.mlp.experts.0.up_proj have their inputs" in reason


def full(names: list[str]) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return what puts full weights in the place of quantised ones."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if any(f".{each}." in name for each in names)]:
            tensor = tensors.pop(name)
            if name.endswith("qweight"):
                tensors[name.replace("qweight", "weight")] = torch.randn(tensor.shape[1], tensor.shape[0] * 8)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (full(["layers.1.mlp.experts.2"]), "of 4 experts that make model.layers.1.mlp.experts."),
        (full(["experts.3.up_proj"]), "is quantised, and cannot be merged into model.layers.0.mlp.experts."),
        (full(["layers.1.mlp.experts.0.up_proj", "experts.1.up_proj"]), "cannot be merged into"),
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.experts.1.down_proj.scales"),
            "has no model.layers.1.",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.experts.0.other.qweight": torch.zeros(1)}),
            "the model has no linear layer model.layers.0.mlp.experts.0.other",
        ),
    ],
)
def test_mixtures_of_which_something_is_missing_are_refused_in_one_line(
    change: Callable[[dict[str, torch.Tensor]], None], reason: str, written: Callable[..., Written]
) -> None:
    _, directory, _ = written("qwen3_moe", IN_ORDER, gptq, PLAIN)
    checkpoints.change(directory, change)
    assert reason in refused(directory)


def test_experts_that_a_checkpoint_leaves_whole_stay_whole(written: Callable[..., Written]) -> None:
    _, directory, _ = written("qwen3_moe", IN_ORDER, gptq, PLAIN)
    checkpoints.change(directory, full(["layers.1.mlp.experts"]))
    model = loader.load(str(directory), CPU).model
    assert isinstance(model.model.layers[0].mlp.experts, IntExperts)
    assert model.model.layers[1].mlp.experts.gate_up_proj.shape == (4, 64, 64)
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
