"""Quantised weights spread over two real ranks on the CPU: the numbers of one, and weights made once."""

import functools
import json
from collections.abc import Iterator
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
_NAMES = [*_ON_LOAD, *_CHECKPOINTS, "own-float64"]
_TOLERANCE = {"float64": 1e-5, "float32": 1e-3}  # the norms of most models are taken in float32


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directories of tiny models by their names, over which two ranks have run."""
    root = tmp_path_factory.mktemp("quantised")
    source = tiny.tiny_model(root / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(source)
    for name, (kind, shape, fields) in _ON_LOAD.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, **_SHAPE | shape)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for each in model.modules():
            if getattr(each, "bias", None) is not None:
                torch.nn.init.normal_(each.bias)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        (root / name / team_process.FIELDS).write_text(json.dumps(fields))
    for name, (stored, pack, how) in _CHECKPOINTS.items():
        checkpoints.write(source, root / name, stored, pack, **how)
    recipe = Recipe(4, 32, "rtn")
    writing.write(
        str(source), root / "own-float64", recipe, None, EngineConfig(device="cpu"), lambda *_: None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(team_process.CACHE, str(root / "team"))
        results = two_ranks.run("same", *(str(root / name) for name in _NAMES))
        for code, output in results:
            assert code == 0, output
        (root / "output").write_text("".join(output for _, output in results))
        patch.setattr(cache, "directory", lambda: root / "alone")
        yield root


@functools.cache
def _alone(path: Path) -> loader.Loaded:
    return loader.load(str(path), team_process.config_of(path))


@pytest.mark.parametrize("name", _NAMES)
def test_steps_of_two_ranks_give_the_logits_of_one_with_the_same_integers(root: Path, name: str) -> None:
    layers, led = torch.load(root / name / "led.pt")
    heads = 2 if name.startswith("phi3") else 1  # its plan gathers queries, keys and values
    assert layers == ((heads, 16, 16),) * 2
    model = _alone(root / name).model
    assert sum(isinstance(each, IntLinear) for each in model.modules()) in (14, 9)  # phi3 has 4 a layer
    with torch.inference_mode():
        rows = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in paged_steps.sequences()]
    alone = torch.stack(rows)
    assert led.dtype == alone.dtype
    assert float((led - alone).abs().max() / alone.std()) < _TOLERANCE[name.split("-")[1]]
    assert torch.equal(led.argmax(-1), alone.argmax(-1))
    assert len({int(row.argmax()) for row in led}) > 3


def test_an_engine_over_two_ranks_chooses_the_tokens_of_one(root: Path) -> None:
    path = root / _NAMES[0]
    engine = FastEngine.over(_alone(path), EngineConfig())
    try:
        alone = team_process.run(engine)
    finally:
        engine.close()
        _alone.cache_clear()
    assert json.loads((path / "tokens.json").read_text()) == alone
    assert len({token for tokens in alone.values() for token in tokens}) >= 10


def test_one_of_two_ranks_makes_the_weights_that_one_process_makes(root: Path) -> None:
    for name in _ON_LOAD:
        _alone(root / name)
    team, alone = (
        {file.name: file.read_bytes() for file in (root / who).rglob("*.safetensors")}
        for who in ("team", "alone")
    )
    assert len(team) == len(_ON_LOAD)
    assert team == alone
    assert (root / "output").read_text().count("quantising bits=") == len(_ON_LOAD)
