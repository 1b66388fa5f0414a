"""The guards refuse a model whose layers see other tokens than our attention is told, and no other."""

from typing import Any

import pytest

from tests.unit.engine import architectures
from worker.engine import guards

_LLAMA = architectures.CONFIGS["llama"]
_WINDOW: dict[str, Any] = {"sliding_window": 40}
_SWITCH: dict[str, Any] = _WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
_OFF: dict[str, Any] = {"sliding_window": 32768, "use_sliding_window": False}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN2_MOE = architectures.CONFIGS["qwen2_moe"]

UNTOLD = {
    "phimoe": _LLAMA | _WINDOW | _EXPERTS,
    "doge": _LLAMA | _WINDOW | {"keep_window_size": 40},
    "qwen2_moe": _QWEN2_MOE | _SWITCH,
    "olmoe": architectures.CONFIGS["olmoe"] | _WINDOW,
}
RIGHT = {
    "mistral": _LLAMA | _WINDOW,
    "ministral": _LLAMA | _WINDOW,
    "qwen2": _LLAMA | _OFF,
    "qwen2-on": _LLAMA | _SWITCH | {"model_type": "qwen2"},
    "qwen3": _LLAMA | {"sliding_window": None},
    "qwen3-on": _LLAMA | _SWITCH | {"model_type": "qwen3"},
    "qwen2_moe": _QWEN2_MOE | _OFF,
    "phi3": architectures.CONFIGS["phi3"] | _WINDOW,
    "phimoe": _LLAMA | _EXPERTS | {"sliding_window": None},
    "starcoder2": architectures.CONFIGS["starcoder2"] | _WINDOW,
    "mixtral": architectures.CONFIGS["mixtral"] | _WINDOW,
    # These attend in float32, whatever the weights are in.
    "granite_swa": _LLAMA | _WINDOW,
    "vaultgemma": architectures.CONFIGS["gemma2"],
    **{name: architectures.CONFIGS[name] for name in ("gemma2", "gemma3_text", "gpt_oss", "cohere2")},
    **{name: architectures.CONFIGS[name] for name in ("olmo3", "exaone4")},
}


@pytest.mark.parametrize("name", UNTOLD)
def test_a_window_that_the_attention_is_not_told_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architectures.CONFIGS, name, UNTOLD[name])
    model = architectures.build(name)
    before = model.config._attn_implementation
    with pytest.raises(guards.Unsupported, match=r"layer 0 has .* in its mask"):
        guards.prepare(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", RIGHT)
def test_a_window_that_the_attention_is_told_or_that_is_off_is_not_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architectures.CONFIGS, name, RIGHT[name])
    guards.prepare(architectures.build(name))
