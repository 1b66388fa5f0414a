"""The fast engine on a tiny random model in float64: what it counts, and what its guards let through."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.engine import architectures, exactness
from tests.unit.engine.conftest import request
from tests.unit.engine.test_scheduler import distinct_tokens
from worker.engine import Completion, EngineConfig, Request, attention, guards, loader
from worker.engine.fast import FastEngine

_HEAD = [(7 * i) % 250 for i in range(40)]
PROMPTS = [_HEAD + [i] * i for i in range(1, 7)] + [_HEAD, _HEAD, _HEAD[:20], [*_HEAD[:20], 9, 8], [5], [5]]


def requests() -> list[Request]:
    return [request(str(i), p, max_tokens=5 + i % 7, ignore_eos=True) for i, p in enumerate(PROMPTS)]


def run(engine: FastEngine, requests: list[Request]) -> dict[str, Completion]:
    done = {completion.id: completion for completion in engine.generate(requests)}
    assert [completion.error for completion in done.values()] == [None] * len(requests)
    return done


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


@pytest.mark.parametrize("expected", [1, 400])
def test_a_request_that_memory_cannot_hold_fails_alone(open_subject: exactness.Open, expected: int) -> None:
    """Whether that shows at once or when it has run a while, and been preempted."""
    engine = exactness.Schedule(memory_tokens=96, expected=expected).open(open_subject("llama"))
    prompt = list(range(40 if expected == 1 else 100))
    asked = [request("long", prompt, max_tokens=200, ignore_eos=True), request("b", [1, 2], max_tokens=3)]
    times = 0

    def failing_once(ids: list[str]) -> tuple[str, ...]:
        nonlocal times
        times += 1
        if times == 1:
            raise OSError("the ledger is away")
        return ()

    engine.on_admit = failing_once
    engine.add(asked)
    with pytest.raises(OSError, match="away"):
        engine.step()
    done = {c.id: c for c in engine.generate([])}
    assert sorted(done) == ["b", "long"]
    assert "does not fit into the memory" in (done["long"].error or "")
    assert done["b"].error is None
    assert bool(done["long"].token_ids) == (expected == 1)
    assert not engine.has_work
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0
