"""A step that is out of memory is as if it had not been: outputs and counts are those without."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.engine import hashing_pages, test_ahead, test_scheduler, test_speculation
from tests.unit.engine.conftest import request
from tests.unit.engine.test_scheduler import check, distinct_tokens, requests_of, worth_a_part
from worker.engine import Completion, Request, choosing, device_errors, loader, sampling_ahead
from worker.engine.fast import FastEngine
from worker.engine.rows import RowState

Refuse = Callable[[int], bool]
KINDS = ("storages", "pages", "ahead")


def open_hashing(tiny_loaded: loader.Loaded, kind: str, **fields: Any) -> FastEngine:
    """Open an engine over storages, over pages, or over pages and one step ahead."""
    fields = {"kv_memory_bytes": 4000 * test_scheduler.TOKEN_BYTES, **fields}
    if kind == "ahead":
        runner = hashing_pages.PagedHashRunner()
        runner.device = test_ahead.AheadHost()
        return test_ahead.open_engine(tiny_loaded, runner, **fields)
    opening = test_scheduler.open_hashing if kind == "storages" else test_scheduler.open_paged
    return opening(tiny_loaded, **fields)


def refuse_steps(engine: FastEngine, refuse: Refuse, late: Callable[[], bool] = lambda: False) -> list[int]:
    """Let steps of a size be out of memory, before anything is written or, `late`, after all is; return the
    sizes of those that were.
    """
    step, refused = engine._runner.step, []

    def short(packed: Any) -> Tensor:
        if not refuse(len(packed.ids)):
            return step(packed)
        refused.append(len(packed.ids))
        if late():
            step(packed)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine._runner.step = short  # type: ignore[method-assign]
    return refused


@contextmanager
def refused_choices(refuse: Refuse) -> Iterator[list[int]]:
    """Let choices of tokens of so many rows be out of memory, the logits changed; as `refuse_steps`."""
    choose, refused = choosing.choose, list[int]()

    def short(states: Sequence[RowState], logits: Tensor) -> list[int]:
        if refuse(len(states)):
            refused.append(len(states))
            logits.fill_(7.0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return choose(states, logits)

    chosen = sampling_ahead.chosen

    def short_ahead(logits: Tensor, plan: sampling_ahead.Plan) -> tuple[Tensor, Tensor]:
        if refuse(len(logits)):
            refused.append(len(logits))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return chosen(logits, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "choose", short)
        patch.setattr(sampling_ahead, "chosen", short_ahead)
        yield refused


def ran(engine: FastEngine, requests: list[Request]) -> list[Completion]:
    """Run requests to their end, in no more steps than it can take."""
    engine.add(requests)
    engine.expects_more = False
    done: list[Completion] = []
    for _ in range(5000):
        if not engine.has_work:
            return done
        done += engine.step()
    raise AssertionError("it runs for ever")


def above(limit: int, rng: Random, rate: float) -> Refuse:
    """Refuse what is above a limit, and at a rate anything that can be divided."""
    return lambda size: size > limit or (size > 1 and rng.random() < rate)


@pytest.mark.parametrize("kind", KINDS)
@given(
    requests_of(),
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 8),
    worth_a_part,
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 1 << 32),
)
@settings(max_examples=20, deadline=None)
def test_steps_without_memory_change_neither_outputs_nor_counts(
    tiny_loaded: loader.Loaded,
    kind: str,
    requests: list[Request],
    chunk: int,
    running: int,
    tokens: int,
    rows: int,
    worth: int,
    rate: float,
    seed: int,
) -> None:
    rng = Random(seed)
    engine = open_hashing(tiny_loaded, kind, prefill_chunk_tokens=chunk, max_running=running)
    if kind == "storages":
        engine._scheduler.admission.worth_a_part = worth
    refused = refuse_steps(engine, above(tokens, rng, rate), late=lambda: rng.random() < 0.5)
    with refused_choices(above(rows, rng, rate)) as unchosen:
        done = ran(engine, requests)
    check(requests, done)
    stats = engine.stats
    assert stats.out_of_memory_splits == len(refused) + len(unchosen)
    cached = sum(len(r.prompt_ids) for r in requests) - stats.prefill_tokens_computed
    assert sum(c.cached_tokens or 0 for c in done) == cached == stats.prefix_tokens_reused
    if running >= len(requests):
        assert stats.prefill_tokens_computed == distinct_tokens([r.prompt_ids for r in requests])
    assert stats.attention_calls == stats.steps
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


@pytest.mark.parametrize("kind", KINDS)
@given(requests_of(), st.integers(60, 300), st.integers(1, 9), st.integers(1, 8), st.integers(0, 1 << 32))
@settings(max_examples=20, deadline=None)
def test_neither_do_they_while_kv_is_short_and_requests_come_and_go(
    tiny_loaded: loader.Loaded,
    kind: str,
    requests: list[Request],
    budget: int,
    chunk: int,
    limit: int,
    seed: int,
) -> None:
    rng = Random(seed)
    engine = open_hashing(
        tiny_loaded,
        kind,
        prefill_chunk_tokens=chunk,
        max_running=5,
        kv_memory_bytes=budget * test_scheduler.TOKEN_BYTES,
    )
    expected = rng.choice([None, 1, 4])
    if expected is not None:
        engine._scheduler._lengths.expected = lambda job, most: expected  # type: ignore[method-assign]
    refuse_steps(engine, above(limit, rng, 0.3), late=lambda: rng.random() < 0.5)
    todo, done = list(requests), []
    while todo or engine.has_work:
        count = rng.randint(0, 4)
        engine.add(todo[:count])
        todo = todo[count:]
        if rng.random() < 0.1 and engine.running:
            engine.cancel([rng.choice(sorted(engine.running))])
        done += engine.step()
    finished = [c for c in done if c.finish_reason != "cancelled"]
    assert {c.id for c in done} == {r.id for r in requests}
    check([r for r in requests if r.id in {c.id for c in finished}], finished)
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


@pytest.mark.parametrize("kind", KINDS)
@given(requests_of(), st.integers(1, 12), st.integers(1, 5), st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None)
def test_drafts_are_dropped_where_there_is_no_memory_for_them(
    tiny_loaded: loader.Loaded, kind: str, requests: list[Request], tokens: int, rows: int, seed: int
) -> None:
    rng = Random(seed)
    engine = open_hashing(tiny_loaded, kind, max_running=4, speculate="lookup")
    test_speculation.drafting(engine, test_speculation.Free(test_speculation.Hashed()))
    refuse_steps(engine, above(tokens, rng, 0.1))
    with refused_choices(above(rows, rng, 0.2)):
        done = ran(engine, requests)
    check(requests, done)


@pytest.mark.parametrize("kind", KINDS)
def test_only_who_cannot_run_alone_fails(tiny_loaded: loader.Loaded, kind: str) -> None:
    """The model has no memory for one token, which one prompt has; and the others go on."""
    requests = [
        request(str(i), [0, 1, *range(3, 3 + i), 94 if i == 3 else 1], max_tokens=5) for i in range(6)
    ]
    ends = {r.id: test_scheduler.expected(r) for r in requests if r.id != "3"}
    assert not any(94 in tokens for tokens in ends.values())
    engine = open_hashing(tiny_loaded, kind, max_running=6)
    step = engine._runner.step

    def short(packed: Any) -> Tensor:
        if 94 in packed.ids.tolist():
            raise MemoryError("as if the card were full")
        return step(packed)

    engine._runner.step = short  # type: ignore[method-assign]
    done = {c.id: c for c in engine.generate(requests)}
    failed = [c for c in done.values() if c.error]
    assert [c.id for c in failed] == ["3"]
    assert "out of memory" in str(failed[0].error)
    assert {id: done[id].token_ids for id in ends} == ends
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_memory_each_request_fails_and_the_engine_goes_on(
    tiny_loaded: loader.Loaded, kind: str
) -> None:
    requests = [request(str(i), [0, 1, 2, i % 3], n=2, max_tokens=3, temperature=1.0) for i in range(5)]
    engine = open_hashing(tiny_loaded, kind, max_running=3)
    step = engine._runner.step
    refused = refuse_steps(engine, lambda size: True)
    done = ran(engine, requests)
    assert {c.id for c in done} == {r.id for r in requests}
    assert all("out of memory" in str(c.error) for c in done)
    assert len(refused) < 50
    assert engine._memory.used == 0
    engine._runner.step = step  # type: ignore[method-assign]
    again = request("again", [0, 1], max_tokens=3)
    assert _tokens(engine.generate([again])) == {"again": test_scheduler.expected(again)}


@pytest.mark.parametrize("kind", KINDS)
def test_choices_of_one_prompt_go_on_with_as_many_as_there_is_memory_for(
    tiny_loaded: loader.Loaded, kind: str
) -> None:
    """Their first tokens are chosen beside the last token of the prompt, which alone is little."""
    asked = request("a", [0, 1, 2], n=6, max_tokens=4, temperature=1.0, seed=1)
    outputs = []
    for limit in (6, 1):
        engine = open_hashing(tiny_loaded, kind, max_running=6, prefill_chunk_tokens=1)
        with refused_choices(lambda size, most=limit: size > most):  # type: ignore[misc]
            outputs.append(next(iter(engine.generate([asked]))).choices)
    assert [c.error for c in outputs[1]] == [None] * 6
    assert [c.token_ids for c in outputs[0]] == [c.token_ids for c in outputs[1]]


def test_limits_come_back_after_many_steps_that_had_memory(tiny_loaded: loader.Loaded) -> None:
    engine = open_hashing(tiny_loaded, "pages", prefill_chunk_tokens=16, max_running=8)
    full = [True]
    refused = refuse_steps(engine, lambda size: full[0] and size > 2)
    prompts = [[i, *range(10)] for i in range(8)]
    first = [request(f"a{i}", prompt, max_tokens=4) for i, prompt in enumerate(prompts)]
    check(first, list(engine.generate(first)))
    limits = engine._scheduler.limits
    assert limits.tight
    assert (limits.prefill_tokens, limits.decode_rows) == (2, 2)
    full[0], before = False, len(refused)
    second = [request(f"b{i}", prompt, max_tokens=120) for i, prompt in enumerate(prompts)]
    check(second, list(engine.generate(second)))
    assert len(refused) == before
    assert not limits.tight


def test_all_who_decode_have_their_turn(tiny_loaded: loader.Loaded) -> None:
    engine = open_hashing(tiny_loaded, "storages", max_running=5)
    refuse_steps(engine, lambda size: size > 2)
    engine.add([request(str(i), [i], max_tokens=60) for i in range(5)])
    for _ in range(70):
        engine.step()
    lengths = [len(s.row.token_ids) for s in engine._scheduler.running]
    assert len(lengths) == 5
    assert max(lengths) - min(lengths) <= 2


@pytest.mark.parametrize(("code", "short"), [(2, True), (700, False)])
def test_memory_that_cuda_itself_lacks_is_no_lost_device(code: int, short: bool) -> None:
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # type: ignore[attr-defined]
    assert device_errors.is_out_of_memory(error) == short
    assert device_errors.is_lost(error) != short


def test_other_errors_of_a_step_still_end_it(tiny_loaded: loader.Loaded) -> None:
    engine = open_hashing(tiny_loaded, "storages")
    engine._runner.step = lambda packed: 1 / 0  # type: ignore
    with pytest.raises(ZeroDivisionError):
        list(engine.generate([request("a", [1])]))


def _tokens(done: Iterator[Completion]) -> dict[str, list[int]]:
    return {completion.id: completion.token_ids for completion in done}
