"""Scheduling over pages without weights: a token must see just those before it, whole or by shared rows."""

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine import hashing
from tests.unit.engine.hashing_pages import PAGE_TOKENS, PagedHashRunner
from tests.unit.engine.test_scheduler import TOKEN_BYTES, check, distinct_tokens, requests_of
from worker.engine import EngineConfig, Request, loader
from worker.engine.fast import FastEngine

PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES


def open_paged(tiny_loaded: loader.Loaded, **fields: Any) -> FastEngine:
    loaded = replace(tiny_loaded, vocabulary=hashing.VOCABULARY, eos_ids=frozenset())
    return FastEngine(loaded, EngineConfig(**fields), PagedHashRunner())


@given(requests_of(), st.integers(1, 9), st.integers(1, 6), st.booleans())
@settings(max_examples=50, deadline=None)
def test_any_schedule_is_exact_and_computes_each_prefix_once(
    tiny_loaded: loader.Loaded, requests: list[Request], chunk: int, running: int, cascade: bool
) -> None:
    engine = open_paged(
        tiny_loaded,
        prefill_chunk_tokens=chunk,
        max_running=running,
        cascade=cascade,
        kv_memory_bytes=500 * PAGE_BYTES,
    )
    done = list(engine.generate(requests))
    check(requests, done)
    stats = engine.stats
    cached = sum(len(r.prompt_ids) for r in requests) - stats.prefill_tokens_computed
    assert sum(c.cached_tokens or 0 for c in done) == cached == stats.prefix_tokens_reused
    if running >= len(requests):
        assert stats.prefill_tokens_computed == distinct_tokens([r.prompt_ids for r in requests])
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


@given(requests_of(), st.integers(7, 40), st.integers(1, 9), st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_adding_cancelling_and_little_memory_change_no_output(
    tiny_loaded: loader.Loaded, requests: list[Request], pages: int, chunk: int, seed: int
) -> None:
    rng = Random(seed)
    engine = open_paged(
        tiny_loaded, prefill_chunk_tokens=chunk, max_running=5, kv_memory_bytes=pages * PAGE_BYTES
    )
    expected = rng.choice([None, 1, 4])
    if expected is not None:
        engine._scheduler._lengths.expected = lambda job, most: expected  # type: ignore[method-assign]
    todo, done, cancelled = list(requests), [], set()
    while todo or engine.has_work:
        count = rng.randint(0, 4)
        engine.add(todo[:count])
        todo = todo[count:]
        if rng.random() < 0.1 and engine.running:
            victim = rng.choice(sorted(engine.running))
            cancelled.add(victim)
            engine.cancel([victim])
        done += engine.step()
        assert engine.stats.kv_bytes_in_use <= pages * PAGE_BYTES
    assert {c.id for c in done} == {r.id for r in requests}
    finished = [c for c in done if c.finish_reason != "cancelled"]
    check([r for r in requests if r.id in {c.id for c in finished}], finished)
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0
