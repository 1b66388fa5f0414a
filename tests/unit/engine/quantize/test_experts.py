"""Experts that transformers keeps in one weight are quantised as linear layers are, one by one."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.engine import architectures
from tests.unit.engine.conftest import native_or_skip, request
from tests.unit.engine.quantize import checkpoints, mixtures
from worker.engine import Engine, EngineConfig, loader, parallel
from worker.engine.fast import FastEngine
from worker.engine.packed import PackedLinear
from worker.engine.quantize import apply, experts, hollow, mixing, turns
from worker.engine.quantize.int_experts import IntExperts
from worker.engine.quantize.recipe import Recipe
from worker.engine.quantize.tensors import Tensors
from worker.quantize_command import quantize

INT4 = EngineConfig(device="cpu", quantize="int4", quantize_group=32, quantize_head="keep")
# Experts under other names in the checkpoint, transposed with biases, plain ones, and beside shared ones.
KINDS = (
    "mixtral",
    "gpt_oss",
    pytest.param("qwen3_moe", marks=pytest.mark.long),
    pytest.param("qwen2_moe", marks=pytest.mark.long),
)


@pytest.fixture(scope="module")
def written(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the checkpoint of a mixture by its kind."""
    return functools.cache(
        lambda kind: mixtures.write(kind, tiny_path, tmp_path_factory.mktemp("mixture") / kind)
    )


def generated(source: Path, config: EngineConfig, prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine.load(str(source), config)
    assert isinstance(engine, FastEngine)
    asked = [request(str(i), ids, max_tokens=12, ignore_eos=True) for i, ids in enumerate(prompts)]
    try:
        found = {done.id: done.token_ids for done in engine.generate(asked)}
    finally:
        engine.close()
    return [found[str(i)] for i in range(len(prompts))]


PROMPTS = [[(11 * i * s + 5) % 250 for i in range(3 * s)] for s in range(1, 5)]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        pytest.param({"dtype": "float64"}, marks=pytest.mark.long),
        pytest.param({"quantize": "int8"}, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_says_what_generate_says_with_dequantised_experts(
    kind: str, changed: dict[str, Any], written: Callable[[str], Path]
) -> None:
    check(written(kind), replace(INT4, **changed))


def test_in_float64_the_tokens_are_exactly_those_of_generate(written: Callable[[str], Path]) -> None:
    check(written("qwen3_moe"), replace(INT4, dtype="float64", quantize_method="rtn"))


def check(source: Path, config: EngineConfig) -> None:
    """Compare what the engine says with what transformers says with the numbers that integers stand for."""
    model = loader.load(str(source), config).model
    weights = {name: each.dequantized() for name, each in mixtures.weights(model).items()}
    assert sum(".experts." in name for name in weights) == 2 * 4 * 2
    whole = mixtures.reference(source, weights, model.dtype)
    found = generated(source, config, PROMPTS)
    assert found == [checkpoints.greedy(whole, ids, 12) for ids in PROMPTS]
    assert len({token for ids in found for token in ids}) >= 10


def test_experts_run_on_the_kernels(written: Callable[[str], Path]) -> None:
    native_or_skip(torch.float32)
    engine = Engine.load(str(written("gpt_oss")), INT4)
    assert isinstance(engine, FastEngine)
    try:
        assert (engine.stats.native_kernels, engine.stats.int_fallbacks) == (1, 0)
        modules = list(engine._runner._model.modules())
    finally:
        engine.close()
    mixtures = [each for each in modules if isinstance(each, IntExperts)]
    products = [each for mixture in mixtures for each in (*mixture.up, *mixture.down)]
    assert [type(each) for each in products] == [PackedLinear] * 16


@pytest.mark.parametrize(("quantize", "most"), [("int4", 0.32), ("int8", 0.57)])
def test_experts_take_as_few_bytes_as_linear_layers(
    quantize: Any, most: float, written: Callable[[str], Path]
) -> None:
    model = loader.load(str(written("qwen3_moe")), replace(INT4, quantize=quantize)).model
    weights = mixtures.weights(model).values()
    size = sum(2 * each.outputs * each.inputs for each in weights)
    assert sum(each.nbytes for each in weights) <= most * size
    left = [name for name, each in model.named_parameters() if each.dim() == 3]
    assert left == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_of_an_expert_is_loaded_before_its_turn(
    kind: str, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = apply.quantize

    def seen(model: Any, *args: Any, **named: Any) -> Any:
        assert not [name for name, each in model.named_parameters() if each.dim() == 3]
        return done(model, *args, **named)

    monkeypatch.setattr(apply, "quantize", seen)
    assert mixtures.weights(loader.load(str(written(kind)), INT4).model)


def test_experts_are_kept_and_found(
    written: Callable[[str], Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mixtures.weights(loader.load(str(written("mixtral")), INT4).model)
    monkeypatch.setattr(apply, "quantize", lambda *_, **__: pytest.fail("they are made again"))
    again = mixtures.weights(loader.load(str(written("mixtral")), INT4).model)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name].dequantized(), again[name].dequantized()) for name in first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_what_is_written_loads_as_what_is_quantised(
    kind: str, calibrated: bool, written: Callable[[str], Path], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question. " * 30)
    how = ("--calibrate", text) if calibrated else ("--rtn",)
    out = tmp_path / "out"
    args = [written(kind), "-o", out, *how, "--group", 32, "--device", "cpu"]
    done = CliRunner().invoke(quantize, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    with_tensors = Tensors([out / "model.safetensors"])
    assert not [
        name for name in with_tensors.names if name.endswith(("proj.weight", "w1.weight", "_up_proj"))
    ]
    with_tensors.close()
    model = loader.load(str(out), EngineConfig(device="cpu", quantize_head="keep")).model
    found = mixtures.weights(model)
    assert sum(".experts." in name for name in found) == 2 * 4 * 2
    if not calibrated:
        same = mixtures.weights(loader.load(str(written(kind)), replace(INT4, quantize_method="rtn")).model)
        assert found.keys() == same.keys()
        assert all(torch.equal(found[name].packed, same[name].packed) for name in found)


def test_an_expert_is_rounded_by_what_goes_into_it(written: Callable[[str], Path]) -> None:
    """Weighting by its own inputs makes each expert's output err less than rounding does."""
    models = {
        method: loader.load(str(written("qwen3_moe")), replace(INT4, quantize_method=method)).model
        for method in ("rtn", "sampled")
    }
    whole = loader.load(str(written("qwen3_moe")), EngineConfig(device="cpu")).model
    x = torch.randn(500, 32, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 32)
    index = torch.arange(500)[:, None] % 4
    given = x, index, torch.ones(500, 1)
    recipe = Recipe(4, 32, "sampled")
    module = whole.model.layers[0].mlp.experts
    expected = module(*given).detach()
    run = turns.Turns(whole, Tensors([]), recipe, lambda *_: None)
    made = run.make_experts("model.layers.0.mlp.experts", module, x, index)
    rounded = models["rtn"].model.layers[0].mlp.experts
    errors = [(each(*given) - expected).square().mean() for each in (made, rounded)]
    assert errors[0] < 0.8 * errors[1]


def test_all_rows_speak_for_an_expert_that_few_choose() -> None:
    hidden = torch.randn(100, 8)
    index = torch.zeros(100, 1, dtype=torch.long)
    index[:31] = 2
    index[31:63] = 1
    rows = turns.rows(hidden, index, 4)
    assert torch.equal(rows[0], hidden[63:])  # type: ignore[arg-type]
    assert torch.equal(rows[1], hidden[31:63])  # type: ignore[arg-type]
    assert rows[2] is hidden
    assert rows[3] is hidden


def test_no_token_for_an_expert_and_no_token_at_all_are_nothing_special() -> None:
    model = architectures.build("qwen3_moe").float()
    own = model.model.layers[0].mlp.experts
    run = turns.Turns(model, Tensors([]), Recipe(8, 32, "rtn"), lambda *_: None)
    x = torch.randn(5, 32)
    index = torch.tensor([[1, 3]] * 5)
    expected = own(x, index, torch.full((5, 2), 0.5)).detach()
    made = run.make_experts("model.layers.0.mlp.experts", own, None, None)
    assert isinstance(made, IntExperts)
    found = made(x, index, torch.full((5, 2), 0.5))
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.std()))
    assert made(x[:0], index[:0], torch.zeros(0, 2)).shape == (0, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_the_host_knows_nothing_of_make_the_same(kind: str) -> None:
    model = architectures.build(kind)
    own = model.model.layers[0].mlp.experts
    run = turns.Turns(model, Tensors([]), Recipe(4, 32, "rtn"), lambda *_: None)
    made = run.make_experts("model.layers.0.mlp.experts", own, None, None)
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(9, 32, generator=chance, dtype=torch.float64)
    weights, index = torch.rand(9, 4, generator=chance, dtype=torch.float64).topk(2)
    given = own, made._expert, x, index, weights
    torch.testing.assert_close(mixing.mix_unseen(*given), mixing.mix(*given))
    torch.testing.assert_close(made(x, index, weights), mixing.mix(*given))

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        return torch.full_like(rows, 1.0 if number in index[0] else torch.inf)

    assert mixing.mix_unseen(own, expert, *given[2:])[0].isfinite().all()


def test_what_was_kept_before_experts_were_quantised_is_made_anew(
    written: Callable[[str], Path], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(INT4, quantize_method="rtn")
    first = mixtures.weights(loader.load(str(written("mixtral")), config).model)
    (kept,) = cache.glob("*.safetensors")
    old = {name: each for name, each in load_file(kept).items() if ".experts." not in name}
    save_file(old, kept)
    again = mixtures.weights(loader.load(str(written("mixtral")), config).model)
    assert "quantised weights are made anew" in caplog.text
    assert first.keys() == again.keys()


def test_experts_that_do_not_describe_themselves_stay_and_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = {"intermediate_size_mlp": 64, "num_local_experts": 4, "pad_token_id": 0, "use_qk_norm": False}
    config = AutoConfig.for_model("llama4_text", **architectures.CONFIGS["llama"] | sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with caplog.at_level(logging.WARNING):
        apply.quantize(model, Tensors([]), Recipe(4, 32, "rtn"), None)
    assert "4 weights of three dimensions stay as they are" in caplog.text
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_over_several_ranks_experts_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    team = parallel.Team(0, 2, torch.device("cpu"), None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(parallel, "current", lambda: team)
    model = architectures.build("mixtral").float()
    with caplog.at_level(logging.WARNING):
        made = apply.quantize(model, Tensors([]), Recipe(4, 32, "rtn"), None, in_place=False)
    assert "4 weights of three dimensions stay as they are" in caplog.text
    assert not [name for name in made if ".experts." in name]


def test_experts_that_are_not_what_they_say_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = architectures.build("qwen3_moe").float()
    for layer in model.model.layers:
        kind = type(layer.mlp.experts)
        layer.mlp.experts.__class__ = type("Doubled", (kind,), {"forward": _doubled})
    ids = torch.tensor([[1, 2, 3]])
    with caplog.at_level(logging.WARNING):
        apply.quantize(model, Tensors([]), Recipe(8, 32, "rtn"), None)
    assert "4 weights of three dimensions stay as they are" in caplog.text
    assert not [each for each in model.modules() if isinstance(each, IntExperts)]
    assert model(ids).logits.isfinite().all()


def _doubled(self: Any, *args: Any) -> torch.Tensor:
    return 2 * super(type(self), self).forward(*args)  # type: ignore[no-any-return,misc]


def test_experts_that_no_group_divides_stay(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    odd = architectures.CONFIGS["qwen3_moe"] | {"moe_intermediate_size": 24}
    monkeypatch.setitem(architectures.CONFIGS, "qwen3_moe", odd)
    source = mixtures.write("qwen3_moe", tiny_path, tmp_path / "odd")
    with caplog.at_level(logging.WARNING):
        model = loader.load(str(source), INT4).model
    assert "16 products stay as they are" in caplog.text
    assert not experts.modules(model).keys() - {f"model.layers.{layer}.mlp.experts" for layer in range(2)}
    assert len(hollow.linears(model)) == 1  # the head
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 48, 32)
