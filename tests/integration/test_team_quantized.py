"""Quantised weights spread over two real ranks on the CPU: the numbers of one, and weights made once."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.integration import paged_steps, team_process, two_ranks
from tests.unit.engine.quantize import checkpoints, layouts
from tests.unit.engine.quantize.test_checkpoint import AWQ, COMPRESSED, GPTQ
from worker.engine import EngineConfig, loader, tiny
from worker.engine.fast import FastEngine
from worker.engine.quantize import cache, writing
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.recipe import Recipe

_SHAPE = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_BIASED = {"attention_bias": True, "mlp_bias": True}
_ON_LOAD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Products of queries, keys and values by outputs, and of what follows by inputs, in whole groups.
    "int4-float64": ("llama", {}, {"quantize": "int4", "quantize_group": 32}),
    # Halves of 32 and 96 inputs in groups of 64, which become 32; biases of both kinds of products.
    "int8-float64": (
        "llama",
        _BIASED | {"intermediate_size": 192},
        {"quantize": "int8", "quantize_method": "rtn"},
    ),
    # Halves of 48 inputs in groups of 32, which nothing divides: ranks have 64 and 32 of them.
    "uneven-float64": ("qwen3", {"intermediate_size": 96}, {"quantize": "int4", "quantize_group": 32}),
    # Outputs that are gathered, and a tied head in 8 bits.
    "phi3-float64": (
        "phi3",
        {"pad_token_id": 0, "tie_word_embeddings": True},
        {"quantize": "int4", "quantize_group": 32, "quantize_head": "int8"},
    ),
    # The fast products take the parts.
    "int4-float32": ("llama", {}, {"quantize": "int4", "quantize_group": 32}),
}
_CHECKPOINTS: dict[str, tuple[dict[str, Any], checkpoints.Pack, dict[str, Any]]] = {
    "gptq-float64": (
        GPTQ,
        lambda weight: layouts.gptq(weight, v2=False),
        {"bits": 4, "group": 32, "symmetric": False, "shuffled": True},
    ),
    "awq-float64": (AWQ, layouts.awq, {"bits": 4, "group": 64, "symmetric": False}),
    "compressed-float64": (
        COMPRESSED,
        lambda weight: layouts.compressed(weight, symmetric=True),
        {"bits": 8, "group": 32, "symmetric": True},
    ),
}
_EVERYDAY = ("int4-float64", "gptq-float64")
_LONG = tuple(name for name in (*_ON_LOAD, *_CHECKPOINTS, "own-float64") if name not in _EVERYDAY)
_NAMES = [*_EVERYDAY, *(pytest.param(name, marks=pytest.mark.long) for name in _LONG)]
_TOLERANCE = {"float64": 1e-5, "float32": 1e-3}  # the norms of most models are taken in float32


@dataclass
class Spread:
    """Tiny models by name, over which two ranks have run: those of a tier at the same time."""

    root: Path
    outputs: dict[tuple[str, ...], str] = field(default_factory=dict)

    def directory(self, name: str) -> Path:
        names = _EVERYDAY if name in _EVERYDAY else _LONG
        if names not in self.outputs:
            for each in names:
                _write(self.root, each)
            results = two_ranks.run("same", *(str(self.root / each) for each in names))
            assert [code for code, _ in results] == [0, 0], results
            self.outputs[names] = "".join(output for _, output in results)
        return self.root / name


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    root = tmp_path_factory.mktemp("quantised")
    tiny.tiny_model(root / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(team_process.CACHE, str(root / "team"))
        patch.setattr(cache, "directory", lambda: root / "alone")
        yield Spread(root)
    _alone.cache_clear()


def _write(root: Path, name: str) -> None:
    source, target = root / "tiny", root / name
    if name in _CHECKPOINTS:
        stored, pack, how = _CHECKPOINTS[name]
        checkpoints.write(source, target, stored, pack, **how)
    elif name in _ON_LOAD:
        _write_full(source, target, *_ON_LOAD[name])
    else:
        config = EngineConfig(device="cpu")
        writing.write(str(source), target, Recipe(4, 32, "rtn"), None, config, lambda *_: None)


def _write_full(source: Path, target: Path, kind: str, shape: dict[str, Any], fields: dict[str, Any]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **_SHAPE | shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for each in model.modules():
            if getattr(each, "bias", None) is not None:
                torch.nn.init.normal_(each.bias)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    (target / team_process.FIELDS).write_text(json.dumps(fields))


@functools.cache
def _alone(path: Path) -> loader.Loaded:
    return _load(path)


def _load(path: Path) -> loader.Loaded:
    return loader.load(str(path), team_process.config_of(path))


@pytest.mark.parametrize("name", _NAMES)
def test_steps_of_two_ranks_give_the_logits_of_one_with_the_same_integers(spread: Spread, name: str) -> None:
    directory = spread.directory(name)
    layers, led = torch.load(directory / "led.pt")
    heads = 2 if name.startswith("phi3") else 1  # its plan gathers queries, keys and values
    assert layers == ((heads, 16, 16),) * 2
    model = _alone(directory).model
    assert sum(isinstance(each, IntLinear) for each in model.modules()) in (
        14,
        15,
        9,
    )  # a head that is rounded, and phi3 has 4 a layer
    with torch.inference_mode():
        rows = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in paged_steps.sequences()]
    alone = torch.stack(rows)
    assert led.dtype == alone.dtype
    assert float((led - alone).abs().max() / alone.std()) < _TOLERANCE[name.split("-")[1]]
    assert torch.equal(led.argmax(-1), alone.argmax(-1))
    assert len({int(row.argmax()) for row in led}) > 3


@pytest.mark.parametrize("name", [_EVERYDAY[0], pytest.param(_LONG[0], marks=pytest.mark.long)])
def test_an_engine_over_two_ranks_chooses_the_tokens_of_one(spread: Spread, name: str) -> None:
    path = spread.directory(name)
    engine = FastEngine.over(_load(path), EngineConfig())
    try:
        alone = team_process.run(engine)
    finally:
        engine.close()
    assert json.loads((path / "tokens.json").read_text()) == alone
    assert len({token for tokens in alone.values() for token in tokens}) >= 10


@pytest.mark.parametrize("tier", [_EVERYDAY, pytest.param(_LONG, marks=pytest.mark.long)])
def test_one_of_two_ranks_makes_the_weights_that_one_process_makes(
    spread: Spread, tier: tuple[str, ...]
) -> None:
    names = [name for name in tier if name in _ON_LOAD]
    for name in names:
        _load(spread.directory(name))
    team, alone = (
        {file.name: file.read_bytes() for file in (spread.root / who).glob("*.safetensors")}
        for who in ("team", "alone")
    )
    assert len(team) >= len(names)
    assert team == alone
    assert spread.outputs[tier].count(":quantising\n") == len(names)
