"""Models with weights of integers: the tokens that `generate` gives with the numbers these stand for."""

from typing import Any

import pytest
import torch

from tests.unit.engine import architectures, grouped
from tests.unit.engine.conftest import native_or_skip
from tests.unit.engine.test_exactness import PREEMPTING, long_ones
from worker.engine import EngineConfig, guards, loader, opening, packed, parts
from worker.engine.fallback import FallbackEngine
from worker.engine.fast import FastEngine
from worker.engine.fused import FusedLayer
from worker.engine.merged import MergedLayer
from worker.engine.native import library
from worker.engine.packed import PackedLinear
from worker.engine.quantize.linear import IntLinear


def model(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """Return a random model of integers; norms are not the usual 1."""
    made = architectures.build(name)
    for key, weight in made.named_parameters():
        if "norm" in key:
            weight.data += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return grouped.quantize(made.to(dtype), **fields)


@torch.inference_mode()
def wanted(subject: Any) -> dict[str, list[int]]:
    """Return what `generate` gives with the dequantised weights in float64."""
    precise, tokens = grouped.dequantized(subject), {}
    for each in long_ones():
        ids, count = torch.tensor([each.prompt_ids]), each.sampling.max_tokens
        out = precise.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens[each.id] = out[0, ids.shape[1] :].tolist()
    return tokens


def tokens(engine: Any) -> dict[str, list[int]]:
    done = {completion.id: completion for completion in engine.generate(long_ones())}
    assert {completion.error for completion in done.values()} == {None}
    return {id: completion.token_ids for id, completion in done.items()}


def open_engine(subject: Any, tiny_loaded: loader.Loaded, **fields: Any) -> Any:
    config = EngineConfig(kv_memory_bytes=1 << 22, **PREEMPTING.config, **fields)
    return opening.over(loader.wrap(subject, tiny_loaded.tokenizer), config)


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3", "gpt_neox", "gemma2"]
    + [pytest.param(name, marks=pytest.mark.long) for name in ("qwen2", "mistral", "gemma")],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_on_a_cpu_the_tokens_are_those_of_generate(name: str, bits: int, tiny_loaded: loader.Loaded) -> None:
    native_or_skip(torch.float32)
    subject = model(name, bits=bits)
    expected = wanted(subject)
    engine = open_engine(subject, tiny_loaded)
    assert isinstance(engine, FastEngine)
    assert (engine.stats.native_kernels, engine.stats.int_fallbacks) == (1, 0)
    assert tokens(engine) == expected


@pytest.mark.parametrize("ordered", [False, True])
def test_layers_of_integers_run_as_one_call(ordered: bool, tiny_loaded: loader.Loaded) -> None:
    native_or_skip(torch.float32)
    subject = model("qwen3", ordered=ordered)
    expected = wanted(subject)
    engine = open_engine(subject, tiny_loaded)
    layers = engine._runner._model.model.layers
    assert all(isinstance(layer, FusedLayer) and layer._whole is not None for layer in layers)
    assert tokens(engine) == expected


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_without_kernels_the_tokens_are_those_of_generate(name: str, tiny_loaded: loader.Loaded) -> None:
    subject = model(name, torch.float64)
    expected = wanted(subject)
    engine = open_engine(subject, tiny_loaded, kernels="torch")
    assert all(isinstance(layer, MergedLayer) for layer in engine._runner._model.model.layers)
    assert engine.stats.int_fallbacks == 8  # qkv, output, gate with up, and down, of 2 layers
    assert tokens(engine) == expected


def test_in_the_fallback_the_tokens_are_those_of_generate(tiny_loaded: loader.Loaded) -> None:
    native_or_skip(torch.float32)
    subject = model("llama")
    expected = wanted(subject)
    engine = open_engine(subject, tiny_loaded, fast=False)
    assert isinstance(engine, FallbackEngine)
    assert engine.stats.int_fallbacks == 0
    assert tokens(engine) == expected


@pytest.mark.parametrize("but", ["q_proj", "up_proj"])
def test_numbers_beside_integers_keep_a_layer_apart(but: str, tiny_loaded: loader.Loaded) -> None:
    native_or_skip(torch.float32)
    subject = model("llama", but=(but,))
    assert not parts.looks_fusable(subject.model.layers[0])
    expected = wanted(subject)
    engine = open_engine(subject, tiny_loaded)
    assert isinstance(engine._runner._model.model.layers[0].self_attn.o_proj, PackedLinear)
    assert tokens(engine) == expected


def test_products_of_two_formats_in_one_layer_are_fused(tiny_loaded: loader.Loaded) -> None:
    native_or_skip(torch.float32)
    subject = grouped.quantize(model("llama", but=("o_proj", "down_proj")), bits=8)
    expected = wanted(subject)
    engine = open_engine(subject, tiny_loaded)
    assert all(isinstance(layer, FusedLayer) for layer in engine._runner._model.model.layers)
    assert tokens(engine) == expected


def test_a_head_of_integers_is_packed(tiny_loaded: loader.Loaded) -> None:
    native_or_skip(torch.float32)
    subject = model("llama")
    subject.lm_head = IntLinear(grouped.nearest(subject.lm_head.weight.data, bits=8))
    expected = wanted(subject)
    engine = open_engine(subject, tiny_loaded)
    assert isinstance(subject.lm_head, PackedLinear)
    assert tokens(engine) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])
def test_the_guards_accept_integers_in_half_precision(name: str, dtype: torch.dtype) -> None:
    subject = model(name, dtype)
    guards.prepare(subject)
    assert all(isinstance(layer, MergedLayer) for layer in subject.model.layers)
    assert any(isinstance(module, IntLinear) for module in subject.modules())


def test_the_host_takes_what_was_merged_and_not_what_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model("llama", torch.bfloat16)
    subject.model.layers[0].mlp.extra = torch.nn.Identity()  # no gated MLP: it stays as it is
    taken: list[int] = []

    def spare(replaced: packed.Replaced) -> None:
        taken.append(len(guards._taken_over(replaced)))
        assert not set(guards._taken_over(replaced)) & set(subject.modules())

    monkeypatch.setattr(guards, "_spare", spare)
    guards.prepare(subject)
    # Here o_proj and down_proj, which nothing is merged with, have no faster form: they run as they are.
    assert taken[:2] == [3, 5]


def test_a_model_of_integers_that_fuses_wrongly_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip(torch.float32)
    monkeypatch.setattr(parts, "norm_weight", lambda norm, size: torch.ones(size))
    subject = model("llama")
    layer = subject.model.layers[0]
    guards.prepare(subject)
    assert subject.model.layers[0] is layer
    assert isinstance(layer.mlp.up_proj, PackedLinear)


def test_without_kernels_integers_are_left_to_torch_and_counted() -> None:
    layers = torch.nn.Sequential(IntLinear(grouped.random_weight(8, 64)))
    with library.disabled():
        assert list(packed.pack_all(layers)) == []
        assert packed.count_plain_integers(layers) == 1
