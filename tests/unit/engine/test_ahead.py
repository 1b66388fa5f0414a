"""A host that is one step ahead changes no output, whatever the device has not done yet."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.engine import hashing
from tests.unit.engine.hashing_late import LateHashRunner
from tests.unit.engine.hashing_pages import PAGE_TOKENS, PagedHashRunner
from tests.unit.engine.late_device import LateDevice, LateTensor
from tests.unit.engine.test_scheduler import TOKEN_BYTES, check, requests_of
from worker.engine import Completion, EngineConfig, Request, Sampling, choosing, loader, sampling
from worker.engine import device as devices
from worker.engine.fast import FastEngine


class AheadHost(devices.Host):
    """Says of itself that it is late, and is not."""

    ahead = True


PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES
# The last ones need the host: all wait for them. Of the others, few candidates make some tokens doubtful.
SAMPLINGS: list[dict[str, Any]] = [
    *({}, {}, {"temperature": 0.4}, {"temperature": 0.7, "top_k": 2}, {"temperature": 0.5, "top_p": 0.5}),
    *({"temperature": 1.0, "min_p": 0.9}, {"stop": ("a",)}, {"n": 2, "temperature": 0.4}),
    *({"logprobs": 1}, {"min_tokens": 3, "stop": ("b",)}, {"presence_penalty": 0.5}),
]


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FIRST_CANDIDATES", 4)


@pytest.fixture(autouse=True)
def choosing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host read the logits that it chooses from, as on a real device: by waiting for them."""
    choose = choosing.choose

    def chosen(states: Any, logits: Tensor) -> list[int]:
        if isinstance(logits, LateTensor):
            logits = torch.from_numpy(logits.device_of.fetch(logits).wait())
        return choose(states, logits)

    monkeypatch.setattr(choosing, "choose", chosen)


def open_engine(tiny_loaded: loader.Loaded, runner: Any, **fields: Any) -> FastEngine:
    loaded = replace(tiny_loaded, vocabulary=hashing.VOCABULARY, eos_ids=frozenset())
    return FastEngine(loaded, EngineConfig(**fields), runner)


@st.composite
def asked(draw: st.DrawFn) -> list[Request]:
    """Draw requests that share prefixes, each with parameters of its own."""
    kinds = st.sampled_from(SAMPLINGS[: draw(st.sampled_from((5, 8, 11)))])
    return [
        replace(r, sampling=replace(r.sampling, seed=number, **draw(kinds)))
        for number, r in enumerate(draw(requests_of()))
    ]


def outcomes(done: list[Completion]) -> dict[str, Any]:
    return {c.id: [(each.token_ids, each.text, each.finish_reason) for each in c.choices] for c in done}


def in_time() -> Any:
    """A model that has computed when it says so, while the host is ahead all the same."""
    runner = PagedHashRunner()
    runner.device = AheadHost()
    return runner


SCHEDULES = (asked(), st.integers(7, 40), st.integers(1, 9), st.integers(0, 1 << 32))


@pytest.mark.usefixtures("few_candidates")
@given(*SCHEDULES)
@settings(max_examples=20, deadline=None)
def test_outputs_are_those_of_a_host_that_waits(
    tiny_loaded: loader.Loaded, requests: list[Request], pages: int, chunk: int, seed: int
) -> None:
    check_outputs(tiny_loaded, in_time(), requests, pages, chunk, seed)


@pytest.mark.usefixtures("few_candidates")
@given(*SCHEDULES)
@settings(max_examples=6, deadline=None, phases=[Phase.generate])
def test_outputs_are_the_same_on_a_device_that_is_late(
    tiny_loaded: loader.Loaded, requests: list[Request], pages: int, chunk: int, seed: int
) -> None:
    check_outputs(tiny_loaded, LateHashRunner(), requests, pages, chunk, seed)


def check_outputs(
    tiny_loaded: loader.Loaded,
    runner: Any,
    requests: list[Request],
    pages: int,
    chunk: int,
    seed: int,
) -> None:
    """With little memory, some of the host's, requests that join meanwhile, and others that are cancelled."""
    fields = {"prefill_chunk_tokens": chunk, "max_running": 5, "kv_memory_bytes": pages * PAGE_BYTES}
    waiting = open_engine(tiny_loaded, PagedHashRunner(), **fields)
    expected = outcomes(list(waiting.generate(requests)))
    engine = open_engine(tiny_loaded, runner, kv_host_bytes=seed % 20 * PAGE_BYTES, **fields)
    if engine._memory.host is not None:  # type: ignore[union-attr]
        engine._memory.host.streams = not isinstance(runner, LateHashRunner)  # type: ignore[union-attr]
    rng, todo, done = Random(seed), list(requests), []
    cancelled = set()
    while todo or engine.has_work:
        count = rng.randint(0, 4)
        engine.add(todo[:count])
        todo = todo[count:]
        if rng.random() < 0.1 and engine.running:
            cancelled.add(rng.choice(sorted(engine.running)))
            engine.cancel(cancelled)
        done += engine.step()
        assert engine.stats.kv_bytes_in_use <= pages * PAGE_BYTES
    found = outcomes(done)
    assert found.keys() == expected.keys()
    for id in found.keys() - cancelled:
        assert found[id] == expected[id]
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == engine.stats.kv_host_bytes_in_use == 0
    assert engine._stepper.flight is None


def decoding(tiny_loaded: loader.Loaded, **sampling: Any) -> tuple[FastEngine, LateDevice]:
    """Return an engine in the middle of decoding for three requests, and its device."""
    runner = LateHashRunner()
    engine = open_engine(tiny_loaded, runner, kv_memory_bytes=500 * PAGE_BYTES)
    wanted = Sampling(30, **{"temperature": 0.5, "ignore_eos": True, **sampling})
    engine.add([Request(str(i), [i + 1, 5, 7], wanted) for i in range(3)])
    for _ in range(4):
        engine.step()
    assert isinstance(runner.device, LateDevice)
    return engine, runner.device


def test_each_step_is_launched_before_the_last_one_is_waited_for(tiny_loaded: loader.Loaded) -> None:
    engine, device = decoding(tiny_loaded)
    assert engine.stats.steps_ahead == engine.stats.steps - 1
    device.events.clear()
    for _ in range(5):
        engine.step()
    kept = [event for event in device.events if "hash_step" in str(event[1]) or event[0] == "wait"]
    assert [event[0] for event in kept] == ["launch", "wait"] * 5
    first_wait = kept[1][1]
    fetched = [event[1] for event in device.events if event[0] == "fetch"]
    assert [number for kind, number in kept if kind == "wait"] == [first_wait, *fetched[:-1]]


@pytest.mark.parametrize("wanted", [{"logprobs": 0}, {"top_k": 2000}, {"frequency_penalty": 0.1}])
def test_what_only_the_host_can_choose_is_waited_for(
    tiny_loaded: loader.Loaded, wanted: dict[str, Any]
) -> None:
    engine = open_engine(tiny_loaded, in_time(), kv_memory_bytes=500 * PAGE_BYTES)
    done = list(engine.generate([Request("a", [1, 2], Sampling(9, **wanted))]))
    assert (len(done[0].token_ids), engine.stats.steps_ahead) == (9, 0)


@pytest.mark.usefixtures("few_candidates")
def test_a_token_that_the_device_cannot_choose_makes_its_request_wait(tiny_loaded: loader.Loaded) -> None:
    """A step is computed again, once; from then on the host chooses."""
    engine = open_engine(tiny_loaded, in_time(), kv_memory_bytes=500 * PAGE_BYTES)
    engine.add([Request("a", [1, 2], Sampling(9, temperature=0.5, top_p=0.5))])
    done = [completion for _ in range(15) for completion in engine.step()]
    assert [len(completion.token_ids) for completion in done] == [9]
    assert (engine.stats.steps, engine.stats.steps_ahead) == (11, 1)  # and one that was void
    assert engine.stats.tokens_recomputed == 1
    assert engine.stats.prefill_tokens_computed == 2


def test_who_is_preempted_has_read_all_its_tokens(tiny_loaded: loader.Loaded) -> None:
    requests = [Request(str(i), [i + 1, 5, 7, i + 2], Sampling(40, temperature=0)) for i in range(4)]
    engine = open_engine(tiny_loaded, in_time(), kv_memory_bytes=22 * PAGE_BYTES)
    engine._scheduler._lengths.expected = lambda job, most: 1  # type: ignore[method-assign]
    check(requests, list(engine.generate(requests)))
    assert engine.stats.preemptions > 0
    assert engine.stats.steps_ahead > 0


def test_a_choice_that_has_ended_takes_no_more_tokens(tiny_loaded: loader.Loaded) -> None:
    """Its request goes on with another choice, and a step that was launched had a token for it."""
    ended = Sampling(40, temperature=0.9, n=3, stop=tuple("abcdefghijklmnop"))
    requests = [Request(str(seed), [5, 7], replace(ended, seed=seed)) for seed in range(8)]
    waiting = open_engine(tiny_loaded, PagedHashRunner(), kv_memory_bytes=500 * PAGE_BYTES)
    engine = open_engine(tiny_loaded, in_time(), kv_memory_bytes=500 * PAGE_BYTES)
    assert outcomes(list(engine.generate(requests))) == outcomes(list(waiting.generate(requests)))
    assert engine.stats.tokens_sampled == waiting.stats.tokens_sampled


def test_no_step_is_launched_for_a_request_that_is_known_to_end(tiny_loaded: loader.Loaded) -> None:
    engine, _ = decoding(tiny_loaded)
    while engine.has_work:
        engine.step()
    assert engine.stats.steps == 30  # the prompts' last tokens, and each token but the last


def test_without_run_ahead_each_step_is_waited_for(tiny_loaded: loader.Loaded) -> None:
    engine = open_engine(tiny_loaded, in_time(), kv_memory_bytes=500 * PAGE_BYTES, run_ahead=False)
    list(engine.generate([Request("a", [1, 2], Sampling(9, temperature=0))]))
    assert engine.stats.steps_ahead == 0
