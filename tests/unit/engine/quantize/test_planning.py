"""What is planned for quantised weights is what they take once they are loaded."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from jobs import errors
from tests.unit.engine import architectures
from tests.unit.engine.quantize import checkpoints, mixtures
from tests.unit.engine.quantize.test_checkpoint import COMPRESSED, KINDS
from tests.unit.engine.quantize.test_gguf import write as write_gguf
from worker.engine import EngineConfig, footprint, loader
from worker.engine.quantize import writing
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.recipe import Recipe

CPU = EngineConfig(device="cpu", max_running=4, prefill_chunk_tokens=16)


def bytes_of(model: nn.Module) -> int:
    """Return what a loaded model's weights take."""
    numbers = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return numbers + sum(each.grouped.nbytes for each in model.modules() if isinstance(each, IntLinear))


def check(source: Path, config: EngineConfig = CPU, dtype: torch.dtype = torch.float32) -> None:
    planned = footprint.of_source(str(source), config, dtype)
    named = str(dtype).removeprefix("torch.")
    model = loader.load(str(source), replace(config, dtype=named)).model
    assert any(isinstance(each, IntLinear) for each in model.modules())
    assert planned.weight_bytes == pytest.approx(bytes_of(model), rel=0.02)
    assert planned.quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [
        {"quantize": "int4"},
        {"quantize": "int4", "quantize_group": 32},
        {"quantize": "int8", "quantize_head": "int8"},
        {"quantize_head": "int8"},
    ],
)
def test_what_is_quantised_when_it_is_loaded(
    fields: dict[str, Any], dtype: torch.dtype, tiny_path: Path
) -> None:
    check(tiny_path, replace(CPU, quantize_method="rtn", **fields), dtype)


def test_a_head_of_8_bits_beside_the_embeddings_it_shared(tiny_path: Path, tmp_path: Path) -> None:
    model = architectures.build("qwen3").float()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(tmp_path)
    check(tmp_path, replace(CPU, quantize_head="int8"))


@pytest.mark.parametrize(
    ("name", "fields"), [("mixtral", {"quantize": "int4"}), ("gpt_oss", {"quantize": "int8"})]
)
def test_experts(name: str, fields: dict[str, Any], tiny_path: Path, tmp_path: Path) -> None:
    source = mixtures.write(name, tiny_path, tmp_path / "whole")
    check(source, replace(CPU, quantize_method="rtn", quantize_group=32, **fields))


def test_experts_that_come_quantised(tiny_path: Path, tmp_path: Path) -> None:
    config, pack, how = KINDS["compressed"]
    source = mixtures.write("mixtral", tiny_path, tmp_path / "whole")
    checkpoints.write(source, tmp_path / "model", config, pack, **how)
    check(tmp_path / "model")


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_quantised(kind: str, tiny_path: Path, tmp_path: Path) -> None:
    config, pack, how = KINDS[kind]
    checkpoints.write(tiny_path, tmp_path / "model", config, pack, **how)
    check(tmp_path / "model")
    whole = footprint.of_source(str(tmp_path / "model"), CPU, None)
    (tmp_path / "alone").mkdir()
    shutil.copyfile(tmp_path / "model" / "config.json", tmp_path / "alone" / "config.json")
    assert footprint.of_source(str(tmp_path / "alone"), CPU, None) == whole, "a config without its weights"


def test_what_quantize_writes(tiny_path: Path, tmp_path: Path) -> None:
    writing.write(str(tiny_path), tmp_path / "own", Recipe(4, 32, "rtn"), None, CPU, lambda *_: None)
    check(tmp_path / "own")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_gguf_file(kind: str, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, loader.load(str(tiny_path), CPU), getattr(gguf.GGMLQuantizationType, kind), monkeypatch)
    check(file)


def test_products_that_stay_as_they_are_are_planned_so(tiny_path: Path, tmp_path: Path) -> None:
    config, pack, how = KINDS["compressed"]
    checkpoints.write(tiny_path, tmp_path / "model", config, pack, **how)

    def restore(tensors: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.up_proj"
        tensors[f"{name}.weight"] = torch.zeros(128, 64)
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{name}.{part}"]

    checkpoints.change(tmp_path / "model", restore)
    assert COMPRESSED["ignore"] == ["lm_head"], "the config does not tell"
    check(tmp_path / "model")


def test_a_step_holds_the_largest_weight_while_it_is_dequantised(tiny_path: Path) -> None:
    def step(dtype: torch.dtype, **fields: Any) -> int:
        return footprint.of_source(
            str(tiny_path), replace(CPU, quantize_head="keep", **fields), dtype
        ).step_bytes

    largest = 2 * 128 * 64  # gate_proj and up_proj
    for dtype, fewest, most in ((torch.bfloat16, 3, 8), (torch.float16, 8, 16)):
        more = step(dtype, quantize="int4") - step(dtype)
        assert fewest * largest <= more <= most * largest, dtype


def test_cards_that_share_a_model_have_parts_of_its_integers(tiny_path: Path) -> None:
    config = replace(CPU, quantize="int4")
    whole, half = (footprint.of_source(str(tiny_path), config, None, cards) for cards in (1, 2))
    assert half.weight_bytes == pytest.approx(whole.weight_bytes / 2, rel=0.02)


def test_what_cannot_be_quantised_is_refused_as_it_is_when_it_is_loaded(
    tiny_path: Path, tmp_path: Path
) -> None:
    config, pack, how = KINDS["awq"]
    checkpoints.write(tiny_path, tmp_path / "model", config, pack, **how)

    def load(config: EngineConfig) -> None:
        footprint.of_source(str(tmp_path / "model"), config, None)

    with pytest.raises(errors.ModelUnavailable, match=r"quantised already \(awq\)"):
        load(replace(CPU, quantize="int4"))
    checkpoints.change(tmp_path / "model", lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.scales"))
    with pytest.raises(errors.ModelUnavailable, match=r"no model.layers.0.mlp.up_proj.scales"):
        load(CPU)
