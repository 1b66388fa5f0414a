"""What cannot be spread over several ranks is refused with one line, before weights are read."""

from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.unit.engine import architectures, grouped
from tests.unit.engine.conftest import native_or_skip
from worker.engine import EngineConfig, guards, leading, parallel
from worker.engine.packed import PackedLinear


def _team(size: int) -> parallel.Team:
    """Return a team for what only asks for its size."""
    alone: Any = None
    return parallel.Team(0, size, torch.device("cpu"), alone, alone)


def _config(name: str, **changes: Any) -> Any:
    config = architectures.build(name).config
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def test_a_model_with_a_plan_is_loaded_by_it() -> None:
    options = parallel.load_options(_team(2), _config("qwen3"), EngineConfig(), gguf=False)
    assert options["distributed_config"].tp_size == 2
    assert options["distributed_config"].tp_plan == "auto"


@pytest.mark.parametrize(
    ("name", "size", "fields", "gguf", "reason"),
    [
        ("gpt2", 2, {}, False, "no plan to spread a gpt2 model"),
        ("qwen3", 4, {}, False, "4 ranks do not divide its 2 heads (num_key_value_heads)"),
        ("qwen3", 3, {}, False, "3 ranks do not divide its 4 heads (num_attention_heads)"),
        ("qwen3", 2, {"task": "embed"}, False, "does not embed"),
        ("qwen3", 2, {"speculate": "draft"}, False, "has no draft model"),
        ("qwen3", 2, {}, True, "a GGUF file is not spread"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    name: str, size: int, fields: dict[str, Any], gguf: bool, reason: str
) -> None:
    with pytest.raises(ValueError, match=r"\S") as refused:
        parallel.load_options(_team(size), _config(name), EngineConfig(**fields), gguf)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wanted", ["cuda:1", "mps", "cuda"])
def test_a_rank_takes_the_device_of_its_number_and_no_other(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"LONGHAUL_DEVICE|has no GPU"):
        parallel._device(wanted, 0)


@pytest.mark.parametrize(
    ("wanted", "count", "device"), [("auto", 0, "cpu"), ("cpu", 0, "cpu"), ("auto", 2, "cuda:1")]
)
def test_ranks_are_on_the_gpus_where_there_are_any(
    wanted: str, count: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert parallel._device(wanted, 1) == torch.device(device)


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="rank 2 has no GPU: there are 2"):
        parallel._device("auto", 2)


def test_ranks_of_two_machines_are_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="4 ranks, but 2 on this one"):
        parallel.join("auto", 1)
    assert not dist.is_initialized()


def test_a_share_keeps_the_layers_that_sum_over_the_team() -> None:
    model = architectures.build("llama")
    kinds = [type(module) for module in model.modules()]
    model._tp_size = 2
    guards.prepare(model)
    assert [type(module) for module in model.modules()] == kinds


def test_the_integers_of_a_share_take_their_fastest_form() -> None:
    native_or_skip(torch.float32)
    model = grouped.quantize(architectures.build("llama").float())
    layers = list(model.model.layers)
    model._tp_size = 2
    guards.prepare(model)
    assert list(model.model.layers) == layers
    kinds = {type(each) for each in layers[0].modules() if hasattr(each, "weight")}
    assert kinds == {PackedLinear, type(model.model.norm)}
    assert type(model.lm_head) is torch.nn.Linear


def test_outside_a_team_a_runner_leads_nobody() -> None:
    assert parallel.current() is None
    assert leading.backend("auto", torch.device("cpu")) == "auto"
    ready = guards.prepare(architectures.build("llama"))
    assert leading.lead(ready) is ready
