"""Scheduling, sharing, growth and preemption without weights: the model is a hash of the tokens that
it sees, in slots of storages or in pages.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.engine import hashing
from tests.unit.engine.conftest import request
from tests.unit.engine.hashing_pages import PAGE_TOKENS, PagedHashRunner
from worker.engine import Completion, EngineConfig, Request, loader
from worker.engine.fast import FastEngine
from worker.engine.sequence import distinct_tokens as tokens_of
from worker.engine.step import Step

TOKEN_BYTES = 2 * 2 * 8
PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES
Open = Callable[..., FastEngine]


def open_hashing(tiny_loaded: loader.Loaded, **fields: Any) -> FastEngine:
    loaded = replace(tiny_loaded, vocabulary=hashing.VOCABULARY, eos_ids=frozenset())
    return FastEngine(loaded, EngineConfig(**fields), hashing.HashRunner())


def open_paged(tiny_loaded: loader.Loaded, **fields: Any) -> FastEngine:
    loaded = replace(tiny_loaded, vocabulary=hashing.VOCABULARY, eos_ids=frozenset())
    config = EngineConfig(**{"kv_memory_bytes": 500 * PAGE_BYTES} | fields)
    return FastEngine(loaded, config, PagedHashRunner())


in_both = pytest.mark.parametrize("open_engine", [open_hashing, open_paged], ids=["slots", "pages"])


def expected(r: Request) -> list[int]:
    tokens = list(r.prompt_ids)
    for _ in range(r.sampling.max_tokens):
        tokens.append(hashing.next_token(tokens))
    return tokens[len(r.prompt_ids) :]


def distinct_tokens(prompts: list[list[int]]) -> int:
    """How many tokens a token trie of the prompts has, by brute force."""
    return len({tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))})


def check(requests: list[Request], done: list[Completion]) -> None:
    by_id = {completion.id: completion for completion in done}
    assert len(by_id) == len(done) == len(requests)
    for r in requests:
        assert by_id[r.id].error is None
        assert by_id[r.id].token_ids == expected(r)


# Few different tokens, so that prompts are often prefixes of others, or equal.
prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=14)


@st.composite
def requests_of(draw: st.DrawFn) -> list[Request]:
    return [
        request(str(i), prompt, max_tokens=draw(st.integers(1, 9))) for i, prompt in enumerate(draw(prompts))
    ]


# From how much on a prefix node is attended to as such; below it is copied into the slots of its users.
worth_a_part = st.sampled_from([0, 12, 1024])


@in_both
@given(requests_of(), st.integers(1, 9), st.integers(1, 6), worth_a_part, st.booleans())
@settings(max_examples=20, deadline=None)
def test_any_schedule_is_exact_and_computes_each_prefix_once(
    tiny_loaded: loader.Loaded,
    open_engine: Open,
    requests: list[Request],
    chunk: int,
    running: int,
    worth: int,
    cascade: bool,
) -> None:
    engine = open_engine(tiny_loaded, prefill_chunk_tokens=chunk, max_running=running, cascade=cascade)
    engine._scheduler.admission.worth_a_part = worth
    done = list(engine.generate(requests))
    check(requests, done)
    stats = engine.stats
    cached = sum(len(r.prompt_ids) for r in requests) - stats.prefill_tokens_computed
    assert sum(c.cached_tokens or 0 for c in done) == cached == stats.prefix_tokens_reused
    if running >= len(requests):
        assert stats.prefill_tokens_computed == distinct_tokens([r.prompt_ids for r in requests])
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


@in_both
@given(requests_of(), st.integers(0, 240), st.integers(1, 9), st.integers(0, 1 << 32), worth_a_part)
@settings(max_examples=25, deadline=None)
def test_adding_cancelling_and_little_memory_change_no_output(
    tiny_loaded: loader.Loaded,
    open_engine: Open,
    requests: list[Request],
    spare: int,
    chunk: int,
    seed: int,
    worth: int,
) -> None:
    # From hardly enough for one request to enough for most.
    budget = (7 + spare // 7) * PAGE_BYTES if open_engine is open_paged else (60 + spare) * TOKEN_BYTES
    rng = Random(seed)
    engine = open_engine(
        tiny_loaded,
        prefill_chunk_tokens=chunk,
        max_running=5,
        kv_memory_bytes=budget,
        max_batch_tokens=rng.choice([None, 30]),
        max_queue_delay_seconds=rng.choice([0.0, 0.003]),
        preferred_batch_sizes=rng.choice([(), (2,), (3, 1)]),
        cascade=rng.random() < 0.5,
    )
    engine._scheduler.admission.worth_a_part = worth
    expected = rng.choice([None, 1, 4])
    if expected is not None:
        engine._scheduler._lengths.expected = lambda job, max_tokens: expected  # type: ignore[method-assign]
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
        assert engine.stats.kv_bytes_in_use <= budget
    finished = [c for c in done if c.finish_reason != "cancelled"]
    assert {c.id for c in done} == {r.id for r in requests}
    check([r for r in requests if r.id in {c.id for c in finished}], finished)
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


@in_both
def test_outputs_longer_than_expected_preempt_and_go_on(
    tiny_loaded: loader.Loaded, open_engine: Open
) -> None:
    engine = open_engine(tiny_loaded, kv_memory_bytes=400 * TOKEN_BYTES, prefill_chunk_tokens=64)
    engine._scheduler._lengths.expected = lambda job, max_tokens: 4  # type: ignore[method-assign]
    requests = [request(str(i), [i, 1, 2], max_tokens=90) for i in range(8)]
    check(requests, list(engine.generate(requests)))
    assert engine.stats.preemptions > 0
    assert engine.stats.tokens_recomputed > 0
    assert engine.stats.prefill_tokens_computed == distinct_tokens([r.prompt_ids for r in requests])


@in_both
def test_a_request_larger_than_the_memory_is_an_error_and_others_run(
    tiny_loaded: loader.Loaded, open_engine: Open
) -> None:
    engine = open_engine(tiny_loaded, kv_memory_bytes=100 * TOKEN_BYTES)
    requests = [request("large", [1] * 300), request("small", [1, 2, 3])]
    done = {c.id: c for c in engine.generate(requests)}
    assert "kv_memory_bytes" in str(done["large"].error)
    assert done["small"].token_ids == expected(requests[1])


@in_both
def test_the_next_turn_of_a_conversation_finds_its_history(
    tiny_loaded: loader.Loaded, open_engine: Open
) -> None:
    engine = open_engine(tiny_loaded)
    first = request("first", [5] * 30, max_tokens=20)
    [answer] = engine.generate([first])
    turn = request("second", first.prompt_ids + answer.token_ids + [7, 8, 9], max_tokens=5)
    other = replace(turn, id="other", root="another tenant")
    done = {c.id: c for c in engine.generate([turn, other])}
    assert done["second"].cached_tokens == 30 + 19  # the last token was sampled, not computed
    assert done["other"].cached_tokens == 0
    assert done["second"].token_ids == done["other"].token_ids == expected(turn)


@in_both
def test_a_prefix_outlives_its_requests_until_the_ttl(tiny_loaded: loader.Loaded, open_engine: Open) -> None:
    for ttl, cached in ((1000.0, 29), (0.0, 0)):
        engine = open_engine(tiny_loaded, prefix_ttl_seconds=ttl)
        for id in ("a", "b"):
            [completion] = engine.generate([request(id, [4] * 30, max_tokens=3)])
        assert completion.cached_tokens == cached


@in_both
def test_tokens_of_a_running_request_are_shared_with_one_that_comes_later(
    tiny_loaded: loader.Loaded, open_engine: Open
) -> None:
    engine = open_engine(tiny_loaded)
    early = request("early", [3] * 40, max_tokens=30)
    late = request("late", [3] * 20 + [1, 2], max_tokens=5)
    engine.add([early])
    done = [c for _ in range(5) for c in engine.step()]
    engine.add([late])
    while engine.has_work:
        done += engine.step()
    check([early, late], done)
    assert {c.id: c.cached_tokens for c in done} == {"early": 0, "late": 20}


@in_both
def test_what_on_admit_loses_vanishes_and_what_it_raises_leaves_all_waiting(
    tiny_loaded: loader.Loaded,
    open_engine: Open,
) -> None:
    engine = open_engine(tiny_loaded)
    asked: list[str] = []

    def fail(ids: list[str]) -> list[str]:
        raise ConnectionError(str(ids))

    def lose(ids: list[str]) -> list[str]:
        asked.extend(ids)
        return ["1"]

    requests = [request(str(i), [1, 2, i], max_tokens=4) for i in range(3)]
    engine.on_admit = fail
    engine.add(requests)
    with pytest.raises(ConnectionError):
        engine.step()
    assert engine.waiting == {"0", "1", "2"}
    engine.on_admit = lose
    done = []
    while engine.has_work:
        done += engine.step()
    check([requests[0], requests[2]], done)
    assert sorted(asked) == ["0", "1", "2"]
    counted = engine.stats
    assert (counted.requests_added, counted.requests_finished, counted.requests_cancelled) == (3, 2, 1)


@in_both
def test_a_step_computes_no_more_tokens_than_the_budget(
    tiny_loaded: loader.Loaded, open_engine: Open
) -> None:
    engine = open_engine(tiny_loaded, prefill_chunk_tokens=16, max_running=8)
    requests = [request(str(i), [i] * 50, max_tokens=5) for i in range(8)]
    check(requests, list(engine.generate(requests)))
    assert engine._runner.largest_step <= 16 + 8  # type: ignore[attr-defined]


@in_both
def test_requests_join_as_long_as_max_batch_tokens_allows(
    tiny_loaded: loader.Loaded, open_engine: Open
) -> None:
    engine = open_engine(tiny_loaded, max_batch_tokens=100)
    head = [1] * 60
    requests = [request(str(i), [*head, 2, i], max_tokens=5) for i in range(20)]
    requests += [request("long", [3] * 150, max_tokens=5)]
    engine.add(requests)
    done, sizes = [], []
    while engine.has_work:
        before = engine.running
        done += engine.step()
        running = engine._scheduler.running
        if not engine.running <= before:
            sizes.append(len(running))
            # It may have sampled one more token each since it was asked whether they may join.
            assert len(running) == 1 or tokens_of(running) <= 100 + len(running)
    check(requests, done)
    assert max(sizes) > 10, "the prefix that they share counts once"


@in_both
def test_a_request_larger_than_max_batch_tokens_runs_alone(
    tiny_loaded: loader.Loaded, open_engine: Open
) -> None:
    engine = open_engine(tiny_loaded, max_batch_tokens=10)
    requests = [request(str(i), [i] * 30, max_tokens=3) for i in range(3)]
    engine.add(requests)
    done, most = [], 0
    while engine.has_work:
        done += engine.step()
        most = max(most, len(engine.running))
    check(requests, done)
    assert most == 1


@in_both
def test_the_tail_is_what_decodes_for_few_while_nobody_waits(
    tiny_loaded: loader.Loaded, open_engine: Open
) -> None:
    engine = open_engine(tiny_loaded, max_running=4)
    requests = [request(str(i), [i], max_tokens=10) for i in range(8)]
    engine.add(requests)
    done = [completion for _ in range(10) for completion in engine.step()]
    assert (engine.stats.decode_steps, engine.stats.steps_below_8) == (10, 0), "others wait"
    done += [completion for _ in range(10) for completion in engine.step()]
    check(requests, done)
    assert (engine.stats.decode_steps, engine.stats.steps_below_8) == (20, 10)


def test_a_step_tells_scheduling_from_the_model(
    tiny_loaded: loader.Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_hashing(tiny_loaded)
    step = hashing.HashRunner.step

    def slow(runner: hashing.HashRunner, planned: Step) -> Tensor:
        time.sleep(0.05)
        return step(runner, planned)

    monkeypatch.setattr(hashing.HashRunner, "step", slow)
    [_] = engine.generate([request("a", [1, 2], max_tokens=4)])
    stats = engine.stats
    assert stats.step_seconds - stats.scheduling_seconds >= 4 * 0.05
    assert 0 < stats.scheduling_seconds < stats.step_seconds


@pytest.mark.parametrize(
    "fields",
    [
        {"max_running": 0},
        {"prefill_chunk_tokens": 0},
        {"max_batch_tokens": 0},
        {"max_queue_delay_seconds": -1.0},
        {"preferred_batch_sizes": (8, 0)},
    ],
)
def test_a_config_that_could_never_run_anything_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    ("paged", "decoding", "together"), [(True, 3, True), (True, 1, False), (False, 3, False)]
)
def test_full_chunks_are_mixed_with_decoding_by_its_share(
    tiny_loaded: loader.Loaded, paged: bool, decoding: int, together: bool
) -> None:
    """Long prompts join requests that decode; a chunk is full until the last one of a prompt."""
    fields = {"prefill_chunk_tokens": 8, "max_running": 5, "kv_memory_bytes": 1 << 20}
    engine = (open_paged if paged else open_hashing)(tiny_loaded, **fields)
    short = [request(f"short{i}", [i, 1], max_tokens=60) for i in range(decoding)]
    engine.add(short)
    for _ in range(3):
        engine.step()
    before = engine.stats.decode_steps
    long = [request(f"long{i}", [i] * 40, max_tokens=2) for i in range(2)]
    engine.add(long)
    done = [completion for _ in range(9) for completion in engine.step()]
    assert (engine.stats.decode_steps - before >= 8) == together
    check([*short, *long], done + list(engine.generate([])))
