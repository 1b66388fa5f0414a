"""Models quantised when they are loaded, and what is kept of that on disk."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from jobs import errors
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from tests.unit.engine.quantize import checkpoints
from worker.engine import Engine, EngineConfig, loader
from worker.engine.fast import FastEngine
from worker.engine.quantize import apply
from worker.engine.quantize import cache as stored
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.recipe import Recipe
from worker.engine.quantize.tensors import Tensors

INT4 = EngineConfig(device="cpu", quantize="int4", quantize_group=32, quantize_head="keep")
CHANGES: list[dict[str, Any]] = [
    {},
    {"quantize": "int8"},
    {"quantize_group": 64},
    {"quantize_method": "rtn"},
]


def linears(model: nn.Module) -> dict[str, IntLinear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, IntLinear)}


def dequantised(source: Path, model: nn.Module) -> Any:
    """Return transformers' own model with the numbers that another's integers stand for."""
    whole = loader.load(str(source), EngineConfig(device="cpu")).model
    for name, linear in linears(model).items():
        whole.get_submodule(name).weight.data = linear.grouped.dequantized()
    return whole


@pytest.mark.parametrize("changed", CHANGES)
def test_the_engine_says_what_generate_says_with_dequantised_weights(
    changed: dict[str, Any], tiny_path: Path
) -> None:
    config = replace(INT4, **changed)
    reference = dequantised(tiny_path, loader.load(str(tiny_path), config).model)
    engine = Engine.load(str(tiny_path), config)
    assert isinstance(engine, FastEngine)
    prompts = [[(11 * i * s + 5) % 250 for i in range(3 * s)] for s in range(1, 5)]
    asked = [request(str(i), ids, max_tokens=12, ignore_eos=True) for i, ids in enumerate(prompts)]
    try:
        found = {done.id: done.token_ids for done in engine.generate(asked)}
    finally:
        engine.close()
    assert found == {str(i): checkpoints.greedy(reference, ids, 12) for i, ids in enumerate(prompts)}


def test_products_alone_are_quantised_and_the_head_when_asked(tiny_path: Path) -> None:
    model = loader.load(str(tiny_path), INT4).model
    assert len(linears(model)) == 14
    assert type(model.lm_head) is nn.Linear
    by_itself = loader.load(str(tiny_path), replace(INT4, quantize_head="auto")).model
    assert by_itself.lm_head.grouped.bits == 8
    model = loader.load(str(tiny_path), replace(INT4, quantize=None, quantize_head="int8")).model
    assert list(linears(model)) == ["lm_head"]
    assert model.lm_head.grouped.bits == 8


def test_a_head_of_8_bits_leaves_the_embeddings_it_shared(tiny_path: Path) -> None:
    model = architectures.build("gemma")
    model.tie_weights()
    before = model.get_input_embeddings().weight.clone()
    apply.round_head(model)
    assert isinstance(model.lm_head, IntLinear)
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_have_the_same_products(dtype: str, tiny_path: Path) -> None:
    config = replace(INT4, quantize_method="rtn")
    single = linears(loader.load(str(tiny_path), config).model)
    model = loader.load(str(tiny_path), replace(config, dtype=dtype)).model
    assert model.dtype == getattr(torch, dtype)
    for name, linear in linears(model).items():
        assert torch.equal(linear.grouped.packed, single[name].grouped.packed)
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_no_weight_of_a_product_is_loaded_before_its_turn(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize = apply.quantize

    def seen(model: Any, *args: Any, **how: Any) -> Any:
        assert not [name for name, _ in model.named_parameters() if "proj" in name]
        return quantize(model, *args, **how)

    monkeypatch.setattr(apply, "quantize", seen)
    assert linears(loader.load(str(tiny_path), INT4).model)


def test_a_layer_that_runs_twice_is_quantised_once_wherever_its_weights_go() -> None:
    def made(in_place: bool) -> dict[str, Any]:
        model = architectures.build("llama").float()
        model.model.layers[1] = model.model.layers[0]
        counts: list[int] = []
        ids = torch.arange(64).view(2, 32)
        weights = apply.quantize(
            model, Tensors([]), Recipe(4, 32), ids, lambda count, _: counts.append(count), in_place
        )
        assert counts == list(range(1, 8))
        assert bool(linears(model)) == in_place
        return weights

    placed, apart = made(in_place=True), made(in_place=False)
    for name, weight in placed.items():
        assert torch.equal(weight.packed, apart[name].packed)


@pytest.mark.parametrize("changed", CHANGES[1:])
def test_what_is_kept_is_found_by_its_recipe(
    changed: dict[str, Any], tiny_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loader.load(str(tiny_path), INT4).model
    other = loader.load(str(tiny_path), replace(INT4, **changed)).model
    assert len(list(cache.glob("*.safetensors"))) == 2

    def fail(*_: Any) -> None:
        raise AssertionError("it is made again")

    monkeypatch.setattr(apply, "quantize", fail)
    for model, config in ((first, INT4), (other, replace(INT4, **changed))):
        again = linears(loader.load(str(tiny_path), config).model)
        for name, linear in linears(model).items():
            assert torch.equal(linear.grouped.packed, again[name].grouped.packed)
            assert torch.equal(linear.grouped.dequantized(), again[name].grouped.dequantized())


def test_weights_of_a_file_that_changed_are_made_again(tiny_path: Path, tmp_path: Path, cache: Path) -> None:
    directory = tmp_path / "model"
    checkpoints.copy(tiny_path, directory)
    loader.load(str(directory), INT4)
    checkpoints.change(directory, lambda tensors: None)
    os.utime(directory / "model.safetensors", ns=(0, 0))
    loader.load(str(directory), INT4)
    assert len(list(cache.glob("*.safetensors"))) == 2


def flipped(place: float) -> Callable[[bytes], bytes]:
    """Return what turns over a bit of a file at a part of its length."""

    def change(whole: bytes) -> bytes:
        at = int(place * (len(whole) - 1))
        return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: b"nothing",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole.replace(b'"F16"', b'"I16"', 1),
        *map(flipped, (0, 0.05, 0.5, 0.9, 1)),
    ],
)
def test_what_is_damaged_is_made_anew(damage: Callable[[bytes], bytes], tiny_path: Path, cache: Path) -> None:
    config = replace(INT4, quantize_method="rtn")
    first = linears(loader.load(str(tiny_path), config).model)
    (kept,) = cache.glob("*.safetensors")
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert kept.read_bytes() != whole
    again = linears(loader.load(str(tiny_path), config).model)
    assert torch.equal(
        first["model.layers.0.mlp.up_proj"].grouped.packed, again["model.layers.0.mlp.up_proj"].grouped.packed
    )
    assert kept.read_bytes() == whole


def test_a_crash_leaves_nothing_that_is_taken_for_whole(
    tiny_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(INT4, quantize_method="rtn")
    with monkeypatch.context() as patch:
        patch.setattr("worker.engine.quantize.cache.os.replace", _full)
        with pytest.raises(errors.ModelUnavailable, match="disk"):
            loader.load(str(tiny_path), config)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert linears(loader.load(str(tiny_path), config).model)


def _full(*_: Any) -> None:
    raise OSError("the disk is full")


def test_what_a_killed_process_left_is_in_nobodys_way(tiny_path: Path, cache: Path) -> None:
    config = replace(INT4, quantize_method="rtn")
    loader.load(str(tiny_path), config)
    (kept,) = cache.glob("*.safetensors")
    kept.rename(kept.with_suffix(".part"))
    loader.load(str(tiny_path), config)
    assert {path.suffix for path in cache.iterdir()} == {".lock", ".safetensors"}


def test_two_who_want_the_same_make_it_once(tmp_path: Path) -> None:
    made: list[int] = []
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"any")

    def want() -> None:
        with stored.entry([file], Recipe(4, 32, "rtn")) as entry:
            if not entry.path.is_file():
                made.append(1)
                time.sleep(0.05)
                entry.path.write_bytes(b"made")

    # Files are locked by whoever has opened them: for that, threads are as good as processes.
    threads = [threading.Thread(target=want) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_what_is_kept_serves_every_dtype(tiny_path: Path, cache: Path) -> None:
    half = linears(loader.load(str(tiny_path), replace(INT4, dtype="bfloat16")).model)
    single = linears(loader.load(str(tiny_path), INT4).model)
    assert len(list(cache.glob("*.safetensors"))) == 1
    for name, linear in half.items():
        assert torch.equal(linear.grouped.packed, single[name].grouped.packed)


def test_queues_and_prefixes_of_another_quantisation_are_others() -> None:
    model = ModelSettings.model_validate({"source": "s"})
    settings = [
        Settings(models={"m": model}, **changed)
        for changed in (
            {},
            {"quantize": "int4"},
            {"quantize": "int8"},
            {"quantize": "int4", "quantize_group": 32},
            {"quantize": "int4", "quantize_method": "rtn"},
            {"quantize_head": "int8"},
        )
    ]
    names = [each.fingerprints["m"] for each in settings]
    assert len(set(names)) == len(names)
    assert names[0] == model.fingerprint("m")
    assert names[1].endswith("-int4")
    own = model.model_copy(update={"quantize": "none"})
    assert Settings(models={"m": own}, quantize="int4").fingerprints["m"] == names[0]
    own = model.model_copy(update={"quantize": "int4"})
    assert Settings(models={"m": own}).fingerprints["m"] == names[1]


@pytest.mark.parametrize("field", [{"quantize": "int4"}, {"quantize_head": "int8"}])
def test_a_model_on_vllm_is_not_quantised_in_silence(field: dict[str, str]) -> None:
    model = {"source": "s", "engine": "vllm"}
    with pytest.raises(errors.SettingsError, match="vLLM takes weights as they come"):
        Settings.load(models={"m": model | field})
    settings = Settings.load(models={"m": model}, **field)
    assert settings.fingerprints["m"] == ModelSettings.model_validate(model).fingerprint("m")


def test_what_is_kept_serves_a_model_of_which_some_stays(
    tiny_path: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_config(tiny_path, tmp_path / "odd", intermediate_size=100)
    first = linears(loader.load(str(source), INT4).model)
    assert not [name for name in first if "down_proj" in name]
    monkeypatch.delattr(apply, "quantize")
    again = linears(loader.load(str(source), INT4).model)
    assert again.keys() == first.keys()


def test_a_model_that_nothing_can_be_rounded_of_is_refused(tiny_path: Path, tmp_path: Path) -> None:
    source = with_config(
        tiny_path, tmp_path / "odd", intermediate_size=100, hidden_size=60, num_attention_heads=3, head_dim=20
    )
    assert loader.load(str(source), EngineConfig(device="cpu")).model
    with pytest.raises(errors.ModelUnavailable, match="none of its products can be quantised"):
        loader.load(str(source), INT4)


@pytest.mark.parametrize("base", [False, True], ids=["by its names", "by others"])
@pytest.mark.parametrize("method", ["rtn", "sampled"])
def test_products_kept_the_other_way_round_are_quantised(
    method: Any, base: bool, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = architectures.build("gpt2").float()
    model.save_pretrained(tmp_path)
    if base:
        path = tmp_path / "model.safetensors"
        tensors = {name.removeprefix("transformer."): each for name, each in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    for path in tiny_path.glob("*token*"):
        shutil.copy(path, tmp_path)
    config = replace(INT4, quantize_method=method)
    found = loader.load(str(tmp_path), config).model
    for name, linear in linears(found).items():
        conv = model.get_submodule(name)
        numbers = linear.grouped.dequantized()
        assert (numbers.T - conv.weight).abs().max() < 0.3 * conv.weight.abs().max()
        conv.weight.data = numbers.T
    assert len(linears(found)) == 8
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        assert torch.allclose(found(ids).logits, model(ids).logits, atol=1e-4)
    monkeypatch.delattr(apply, "quantize")
    again = linears(loader.load(str(tmp_path), config).model)
    assert all(
        torch.equal(again[n].grouped.packed, each.grouped.packed) for n, each in linears(found).items()
    )


def with_config(tiny_path: Path, target: Path, **fields: Any) -> Path:
    """Write the tiny model with another config, and weights to match."""
    checkpoints.copy(tiny_path, target)
    config = AutoConfig.from_pretrained(tiny_path, **{"num_key_value_heads": 1} | fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    return target


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3e38])
@pytest.mark.parametrize("method", ["rtn", "sampled"])
def test_weights_that_are_no_numbers_are_refused_by_their_name(
    method: Any, bad: float, tiny_path: Path, tmp_path: Path, cache: Path
) -> None:
    checkpoints.copy(tiny_path, tmp_path / "model")
    name = "model.layers.1.mlp.up_proj"
    checkpoints.change(tmp_path / "model", lambda tensors: tensors[f"{name}.weight"][3, 5].fill_(bad))
    with pytest.raises(errors.ModelUnavailable, match=f"{name} has weights that are not finite"):
        loader.load(str(tmp_path / "model"), replace(INT4, quantize_method=method))
    assert not list(cache.glob("*.safetensors"))
