"""Merged layers in half precision: as near to the truth as the model's own code, and no larger."""

import copy
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine import architectures, exactness
from tests.unit.engine.test_exactness import PREEMPTING, long_ones
from worker.engine import compiling, fused, guards, interface, layer_trial, loader, runner, smollm2
from worker.engine.attention_flash import FlashAttention
from worker.engine.flash_standin import StandIn
from worker.engine.merged import MergedLayer
from worker.engine.native import library
from worker.engine.types import EngineConfig

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
PROMPTS = [[(7 * i * s + s) % 250 for i in range(1, 17)] for s in range(1, 41)]


def model(name: str, dtype: torch.dtype, layers: int = 2) -> Any:
    """Return a random model in half precision, with norms and biases that are not the usual 1 and 0."""
    fields = architectures.CONFIGS[name] | {"num_hidden_layers": layers}
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.setitem(architectures.CONFIGS, name, fields)
        made = architectures.build(name)
        torch.manual_seed(1)
        for key, weight in made.named_parameters():
            if "norm" in key or key.endswith("bias"):
                weight.data += 0.2 * torch.randn_like(weight)
    return made.to(dtype)


@torch.inference_mode()
def logits(model: Any, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def errors(own: Any, prompts: list[list[int]]) -> Iterator[tuple[float, float]]:
    """Yield how far from float64 a prompt's logits are by the model's own code, and by ours."""
    ours, exact = copy.deepcopy(own), copy.deepcopy(own).double()
    guards.prepare(ours)
    assert all(isinstance(layer, MergedLayer) for layer in ours.model.layers)
    for ids in prompts:
        truth = logits(exact, ids)
        with interface.handling(layer_trial.Attending()):
            found = logits(ours, ids)
        yield tuple(float((each - truth).square().mean().sqrt()) for each in (logits(own, ids), found))  # type: ignore


@HALVES
@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen3_moe",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("llama", "qwen2", "mistral", "gemma")),
    ],
)
def test_logits_are_as_near_to_the_truth_as_by_the_models_own_code(name: str, dtype: torch.dtype) -> None:
    own, ours = zip(*errors(model(name, dtype), PROMPTS), strict=True)
    assert median(own) > 0
    assert median(b / a for a, b in zip(own, ours, strict=True)) < 1.1


@pytest.mark.long
@HALVES
def test_logits_of_a_real_model_are_as_near_to_the_truth(dtype: torch.dtype) -> None:
    config = EngineConfig(device="cpu", dtype=str(dtype).removeprefix("torch."))
    own = loader.load(str(smollm2.ensure()), config).model
    prompts = [[(977 * i * s + 31 * s) % 49000 for i in range(1, 33)] for s in range(1, 8)]
    assert median(b / a for a, b in errors(own, prompts)) < 1.1


@HALVES
@pytest.mark.parametrize(
    ("name", "layers"),
    # Residuals are scaled; every fourth layer does not rotate.
    [("granite", 2), ("smollm3", 4)],
)
def test_a_layer_that_only_looks_like_one_stays_as_it_is(name: str, layers: int, dtype: torch.dtype) -> None:
    subject = model(name, dtype, layers)
    guards.prepare(subject)
    assert not any(isinstance(module, MergedLayer) for module in subject.modules())


def storages(*roots: nn.Module) -> int:
    """Return the bytes of all that modules hold."""
    held: dict[int, int] = {}
    for root in roots:
        for module in root.modules():
            for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
                if isinstance(value, Tensor):
                    held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(held.values())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma"])
def test_a_model_is_never_in_memory_twice(name: str) -> None:
    fields = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(architectures.CONFIGS, name, architectures.CONFIGS[name] | fields)
        subject = architectures.build(name).bfloat16()
    before = storages(subject)
    subject.set_attn_implementation(interface.NAME)
    originals = []
    for each in fused.fuse_all(subject, runner.ModelRunner(subject).scorings):
        originals.append(each[2])  # as the guards do, until the trial is over
        assert storages(subject, *originals) < 1.05 * before
    assert len(originals) == 4


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_originals_still_work(name: str) -> None:
    subject = model(name, torch.bfloat16)
    before = logits(subject, PROMPTS[0])
    own = subject.config._attn_implementation
    subject.set_attn_implementation(interface.NAME)
    for parent, child, layer in list(fused.fuse_all(subject, runner.ModelRunner(subject).scorings)):
        setattr(parent, child, layer)
    subject.set_attn_implementation(own)
    assert torch.equal(logits(subject, PROMPTS[0]), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_that_tensor_parallelism_hooks_are_left_alone(dtype: torch.dtype) -> None:
    subject = architectures.build("llama").to(dtype)
    called = []
    layer = subject.model.layers[1]
    layer.self_attn.o_proj.register_forward_hook(lambda *_: called.append(1))
    guards.prepare(subject, compiler=compiling.Compiler())
    assert subject.model.layers[1] is layer
    assert type(layer.self_attn.o_proj) is nn.Linear
    assert called


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_over_pages_the_tokens_are_those_of_generate(name: str, tiny_loaded: loader.Loaded) -> None:
    with library.disabled():  # so that float64, too, is merged
        subject = exactness.Subject.open(name, tiny_loaded.tokenizer, FlashAttention(StandIn(8), 8))
    assert isinstance(subject.loaded.model.model.layers[0], MergedLayer)
    done = PREEMPTING.run(PREEMPTING.open(subject), long_ones())
    exactness.check(name, long_ones(), exactness.tokens_of(done))


@HALVES
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_guards_accept_half_precision_over_pages(name: str, dtype: torch.dtype) -> None:
    subject = model(name, dtype)
    guards.prepare(subject, FlashAttention(StandIn(8), 8))
    assert all(isinstance(layer, MergedLayer) for layer in subject.model.layers)
