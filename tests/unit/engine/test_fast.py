"""The fast engine on tiny random models in float64: token for token what transformers' `generate` gives
alone.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from tests.unit.engine.test_scheduler import distinct_tokens
from worker.engine import Completion, EngineConfig, Request, attention, guards, loader, opening
from worker.engine.fallback import FallbackEngine
from worker.engine.fast import FastEngine

FALL_BACK = (
    *("falcon", "falcon-alibi", "bloom", "mpt", "xglm"),
    *("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "jamba", "qwen3_next", "lfm2"),
)
EVERYDAY = ("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "gpt2")
FAST = [
    name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long)
    for name in architectures.CONFIGS
    if name not in FALL_BACK
]
_HEAD = [(7 * i) % 250 for i in range(40)]
PROMPTS = [_HEAD + [i] * i for i in range(1, 7)] + [_HEAD, _HEAD, _HEAD[:20], [*_HEAD[:20], 9, 8], [5], [5]]


def requests() -> list[Request]:
    return [request(str(i), p, max_tokens=5 + i % 7, ignore_eos=True) for i, p in enumerate(PROMPTS)]


def generate_alone(model: Any, r: Request) -> list[int]:
    ids = torch.tensor([r.prompt_ids])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=r.sampling.max_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(r.prompt_ids) :].tolist()


def run(engine: FastEngine, requests: list[Request]) -> dict[str, Completion]:
    done = {completion.id: completion for completion in engine.generate(requests)}
    assert [completion.error for completion in done.values()] == [None] * len(requests)
    return done


@pytest.mark.parametrize("name", FAST)
def test_random_schedules_are_equal_to_generate(name: str, tiny_loaded: loader.Loaded) -> None:
    wanted = {r.id: generate_alone(architectures.build(name), r) for r in requests()}
    assert len({token for tokens in wanted.values() for token in tokens}) >= 10
    loaded = loader.wrap(architectures.build(name), tiny_loaded.tokenizer)
    runner = guards.prepare(loaded.model)
    rng = Random(name)
    for share in (True, True, True, False):
        config = EngineConfig(
            max_running=rng.randint(1, 12),
            prefill_chunk_tokens=rng.randint(3, 60),
            share_prefixes=share,
            # Sometimes so little that running requests are preempted.
            kv_memory_bytes=runner.layout.token_bytes * rng.choice([200, 400, 100_000]),
        )
        engine = FastEngine(loaded, config, runner)
        engine._scheduler.admission.worth_a_part = rng.choice([0, 100, 1024])
        shuffled = rng.sample(requests(), len(PROMPTS))
        done = run(engine, shuffled)
        assert {id: completion.token_ids for id, completion in done.items()} == wanted
        assert engine.stats.attention_calls == engine.stats.steps * len(runner.layout.layers)
        engine.forget_prefixes()
        assert engine.stats.kv_bytes_in_use == 0


@pytest.fixture(scope="module")
def llama(tiny_loaded: loader.Loaded) -> Callable[..., FastEngine]:
    """Open engines with the given EngineConfig fields over one tiny Llama."""
    loaded = loader.wrap(architectures.build("llama"), tiny_loaded.tokenizer)
    runners = {"dense": guards.prepare(loaded.model, "dense")}
    runners["reference"] = guards.prepare(architectures.build("llama"), "reference")

    def open_engine(backend: str = "dense", **fields: Any) -> FastEngine:
        return FastEngine(loaded, EngineConfig(**fields), runners[backend])

    return open_engine


def test_the_loop_in_float64_gives_the_same(llama: Callable[..., FastEngine]) -> None:
    some = requests()[:9]
    dense = run(llama(prefill_chunk_tokens=16), some)
    oracle = run(llama("reference", prefill_chunk_tokens=16), some)
    assert {id: c.token_ids for id, c in dense.items()} == {id: c.token_ids for id, c in oracle.items()}


@given(st.integers(0, 1 << 32))
@settings(max_examples=10, deadline=None)
def test_neighbours_change_no_draw(llama: Callable[..., FastEngine], seed: int) -> None:
    rng = Random(seed)
    sampled = [
        replace(r, sampling=replace(r.sampling, temperature=0.9, top_p=0.9, seed=i))
        for i, r in enumerate(requests())
    ]
    alone = {r.id: run(llama(max_running=1), [r])[r.id].token_ids for r in sampled[:3]}
    together = run(llama(prefill_chunk_tokens=rng.randint(1, 80)), rng.sample(sampled, len(sampled)))
    assert {id: together[id].token_ids for id in alone} == alone


def test_min_tokens_holds_the_end_token_back(tiny_loaded: loader.Loaded) -> None:
    engine = FastEngine.over(loader.wrap(architectures.build("llama"), tiny_loaded.tokenizer), EngineConfig())
    [free] = engine.generate([request("free", _HEAD, max_tokens=9, ignore_eos=True)])
    engine._eos_ids = frozenset(free.token_ids[2:3])
    [held] = engine.generate([request("held", _HEAD, max_tokens=9, min_tokens=6)])
    assert not engine._eos_ids & set(held.token_ids[:5])
    assert len(held.token_ids) >= 6


def test_counters_are_those_of_the_brute_force(llama: Callable[..., FastEngine]) -> None:
    engine = llama()
    done = run(engine, requests())
    stats = engine.stats
    assert stats.prefill_tokens_computed == distinct_tokens(PROMPTS)
    assert sum(len(r.prompt_ids) - (done[r.id].cached_tokens or 0) for r in requests()) == distinct_tokens(
        PROMPTS
    )
    assert stats.prefix_tokens_reused == sum(map(len, PROMPTS)) - distinct_tokens(PROMPTS)


@pytest.mark.parametrize(
    "name", [n if n in architectures.EVERYDAY else pytest.param(n, marks=pytest.mark.long) for n in FALL_BACK]
)
def test_what_the_guards_refuse_falls_back_and_says_so(
    name: str, tiny_loaded: loader.Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    engine = opening.over(loader.wrap(architectures.build(name), tiny_loaded.tokenizer), EngineConfig())
    try:
        assert isinstance(engine, FallbackEngine)
        assert engine.stats.fallbacks == 1
        assert "fallback" in caplog.text
    finally:
        engine.close()


def test_a_long_rope_falls_back(tiny_loaded: loader.Loaded) -> None:
    model = architectures.build("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(guards.Unsupported, match="longest position"):
        guards.prepare(model)


def test_a_layer_that_only_looks_like_the_fused_one_keeps_its_own_code() -> None:
    model = architectures.build("llama")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: output * 2)
    guards.prepare(model)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_backends_are_named() -> None:
    assert set(attention.BACKENDS) == {"dense", "reference"}
