"""Long contexts and little memory on a real model: all of 8,192 tokens, next to short requests."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.engine_reference import generate_alone, is_tie
from worker.engine import Completion, Engine, EngineConfig, Request, Sampling, loader, smollm2
from worker.engine.fast import FastEngine

LONG_TOKENS, NEW_TOKENS = 8_000, 32
SHORT_LENGTHS = (1, 30, 90, 200)
CONTEXT = 8_192


@pytest.fixture(scope="module")
def reference() -> loader.Loaded:
    """The model as transformers runs it, which no engine has touched."""
    return loader.load(str(smollm2.ensure()), EngineConfig(device="cpu"), "reference")


@pytest.fixture(scope="module")
def token_bytes(reference: loader.Loaded) -> int:
    """What keys and values of one token take in float32."""
    config = reference.model.config
    return int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4)


@pytest.fixture(scope="module")
def prompts(reference: loader.Loaded) -> list[list[int]]:
    """Source code: the long prompt first, then short ones that have nothing in common with it."""
    text = Path(os.__file__).read_text()
    ids: list[int] = reference.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [ids[:LONG_TOKENS], *(ids[500 + length : 500 + 2 * length] for length in SHORT_LENGTHS)]


@pytest.fixture(scope="module")
def expected(reference: loader.Loaded, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` gives for each prompt alone."""
    return [generate_alone(reference, prompt, NEW_TOKENS) for prompt in prompts]


def open_fast(kv_memory_bytes: int | None = None) -> FastEngine:
    engine = Engine.load(str(smollm2.ensure()), EngineConfig(device="cpu", kv_memory_bytes=kv_memory_bytes))
    assert isinstance(engine, FastEngine)
    return engine


def run(engine: FastEngine, prompts: Sequence[list[int]]) -> list[Completion]:
    """Run prompts to their end within the memory; nothing stays of them when prefixes are forgotten."""
    greedy = Sampling(NEW_TOKENS, temperature=0.0)
    engine.add([Request(str(i), prompt, greedy) for i, prompt in enumerate(prompts)])
    done = []
    while engine.has_work:
        done += engine.step()
        assert engine.stats.kv_bytes_in_use <= engine._memory.budget
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0
    return sorted(done, key=lambda completion: int(completion.id))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("memory_tokens", [4 * CONTEXT, CONTEXT], ids=["next to short ones", "alone"])
def test_the_whole_context_is_right(
    memory_tokens: int,
    token_bytes: int,
    reference: loader.Loaded,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    """In the smaller memory there is no room for any other request while the long one runs."""
    engine = open_fast(memory_tokens * token_bytes)
    done = run(engine, prompts)
    engine.close()
    assert [completion.error for completion in done] == [None] * len(prompts)
    for prompt, ours, theirs in zip(prompts, done, expected, strict=True):
        assert ours.token_ids == theirs or is_tie(reference, prompt, theirs, ours.token_ids), len(prompt)


def test_a_request_over_the_memory_is_an_error_line_and_its_neighbours_run(
    token_bytes: int, reference: loader.Loaded, prompts: list[list[int]]
) -> None:
    engine = open_fast(512 * token_bytes)
    long, *short = run(engine, [prompts[0][:600], *prompts[1:3]])
    engine.close()
    assert long.finish_reason == "error"
    assert "kv_memory_bytes" in str(long.error)
    assert "\n" not in str(long.error)
    for prompt, ours in zip(prompts[1:3], short, strict=True):
        theirs = generate_alone(reference, prompt, NEW_TOKENS)
        assert ours.token_ids == theirs or is_tie(reference, prompt, theirs, ours.token_ids)
