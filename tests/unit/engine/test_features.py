"""Every parameter of a request, in one mixed batch, against what it plainly means: exactly in float64."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.engine import architectures, exactness, plain
from tests.unit.engine.conftest import request
from worker.engine import (
    Completion,
    EngineConfig,
    Request,
    Sampling,
    TokenLogprobs,
    grammar,
    loader,
    sampling,
    seeds,
)
from worker.engine.fallback import FallbackEngine
from worker.engine.fast import FastEngine

END = 17
_MOST_TOKENS = 8
_PROMPT = [(7 * i) % 250 for i in range(20)]
_samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, _MOST_TOKENS),
    temperature=st.sampled_from((0.0, 0.7, 1.0, 3.0)),
    top_p=st.sampled_from((1.0, 0.9, 0.3)),
    top_k=st.sampled_from((0, 1, 3, 40)),
    min_p=st.sampled_from((0.0, 0.02, 0.3)),
    seed=st.integers(0, 2**63),
    min_tokens=st.sampled_from((0, 3)),
    ignore_eos=st.booleans(),
    n=st.sampled_from((1, 1, 3)),
    presence_penalty=st.sampled_from((0.0, 1.5, -2.0)),
    frequency_penalty=st.sampled_from((0.0, 0.8)),
    repetition_penalty=st.sampled_from((1.0, 1.3, 0.8)),
    logit_bias=st.sampled_from(((), ((3, 5.0), (END, 2.0)), ((5, -100.0),))),
    logprobs=st.sampled_from((None, 0, 4)),
    prompt_logprobs=st.sampled_from((False, False, True)),
)


@st.composite
def _requests(draw: st.DrawFn) -> list[Request]:
    """Draw requests of which some share a prompt."""
    made = []
    for i, each in enumerate(draw(st.lists(_samplings, min_size=1, max_size=6))):
        wanted = replace(each, prompt_logprobs=each.prompt_logprobs and each.logprobs is not None)
        length = draw(st.sampled_from((1, 12, 20)))
        made.append(Request(str(i), [*_PROMPT[:length], i % 2], wanted))
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    return architectures.build("llama")


@pytest.fixture(scope="module")
def open_fallback(tiny_loaded: loader.Loaded) -> Callable[[], FallbackEngine]:
    loaded = loader.wrap(architectures.build("llama"), tiny_loaded.tokenizer)
    loaded = replace(loaded, eos_ids=frozenset({END}))
    return lambda: FallbackEngine(loaded, EngineConfig())


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=_requests(), schedule=exactness.schedules)
def test_any_parameters_under_any_schedule_mean_what_they_say(
    requests: list[Request], schedule: exactness.Schedule, open_subject: exactness.Open, model: Any
) -> None:
    engine = schedule.open(open_subject("llama"))
    engine._eos_ids = frozenset({END})
    _check(schedule.run(engine, requests), requests, model)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=_requests())
def test_the_fallback_means_the_same(
    requests: list[Request], open_fallback: Callable[[], FallbackEngine], model: Any
) -> None:
    engine = open_fallback()
    try:
        done = {completion.id: completion for completion in engine.generate(requests)}
    finally:
        engine.close()
    # transformers hands logits to the sampler in float32.
    _check(done, requests, model, tolerance=1e-4)


def _check(
    done: dict[str, Completion], requests: Sequence[Request], model: Any, tolerance: float = 1e-4
) -> None:
    for each in requests:
        completion, wanted = done[each.id], each.sampling
        assert completion.error is None
        assert len(completion.choices) == wanted.n
        end = set() if wanted.ignore_eos else {END}
        for index, choice in enumerate(completion.choices):
            seed = seeds.seed_of_choice(wanted.seed, index)
            tokens, under = plain.run(model, each.prompt_ids, replace(wanted, seed=seed), end)
            assert choice.token_ids == tokens
            assert choice.finish_reason == ("stop" if tokens[-1] in end else "length")
            if wanted.logprobs is None:
                assert choice.logprobs is None
                continue
            assert choice.logprobs is not None
            for found, token, exact in zip(choice.logprobs, tokens, under, strict=True):
                _same(found, token, exact.tolist(), wanted.logprobs, tolerance)
        _check_prompt(completion, each, model, tolerance)


def _check_prompt(completion: Completion, each: Request, model: Any, tolerance: float) -> None:
    if not each.sampling.prompt_logprobs:
        assert completion.prompt_logprobs is None
        return
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    exact = plain.logits_of(model, each.prompt_ids).log_softmax(-1).tolist()
    following = zip(completion.prompt_logprobs[1:], each.prompt_ids[1:], exact[:-1], strict=True)
    for found, token, under in following:
        assert found is not None
        _same(found, token, under, each.sampling.logprobs or 0, tolerance)


def _same(found: TokenLogprobs, token: int, under: list[float], most: int, tolerance: float) -> None:
    assert found.token_id == token
    assert found.logprob == pytest.approx(under[token], abs=tolerance)
    highest = sorted(under, reverse=True)[:most]
    assert [value for _, value in found.top] == pytest.approx(highest, abs=tolerance)
    assert [under[id] for id, _ in found.top] == pytest.approx(highest, abs=tolerance)


def test_choices_share_the_prompt(open_subject: exactness.Open) -> None:
    engine = open_subject("llama").engine()
    [done] = engine.generate([request("a", _PROMPT, n=5, temperature=1.0, ignore_eos=True)])
    assert engine.stats.prefill_tokens_computed == len(_PROMPT)
    assert done.cached_tokens == 0
    assert len({tuple(choice.token_ids) for choice in done.choices}) > 1


def test_greedy_choices_run_once(open_subject: exactness.Open) -> None:
    engine = open_subject("llama").engine()
    [done] = engine.generate([request("a", _PROMPT, n=4, max_tokens=6, ignore_eos=True)])
    assert engine.stats.tokens_sampled == 6
    assert len(done.choices) == 4
    assert len({tuple(choice.token_ids) for choice in done.choices}) == 1


def test_a_cancelled_request_takes_all_its_choices_with_it(open_subject: exactness.Open) -> None:
    engine = open_subject("llama").engine(max_running=2)
    engine.add([request("a", _PROMPT, n=6, temperature=1.0, ignore_eos=True), request("b", _PROMPT)])
    engine.step()
    assert engine.running == {"a"}
    assert engine.waiting == {"a", "b"}
    engine.cancel(["a"])
    done = []
    while engine.has_work:
        done += engine.step()
    assert sorted((c.id, c.finish_reason) for c in done) == [("a", "cancelled"), ("b", "length")]
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


def test_a_lost_request_runs_none_of_its_choices(open_subject: exactness.Open) -> None:
    engine = open_subject("llama").engine(max_running=2)
    asked: list[list[str]] = []

    def lose(ids: list[str]) -> list[str]:
        asked.append(ids)
        return ["a"] if "a" in ids else []

    engine.on_admit = lose
    done = list(
        engine.generate(
            [request("a", _PROMPT, n=6, temperature=1.0), request("b", _PROMPT, n=3, temperature=1.0)]
        )
    )
    assert [c.id for c in done] == ["b"]
    assert sorted(id for ids in asked for id in ids) == ["a", "b"]


def test_nobody_waits_for_a_grammar_of_another(
    open_subject: exactness.Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = threading.Event()
    compile = grammar.Grammars._compile

    def slowly(self: grammar.Grammars, text: str) -> Any:
        compiled.wait(60)
        return compile(self, text)

    monkeypatch.setattr(grammar.Grammars, "_compile", slowly)
    engine = open_subject("llama").engine()
    text = '%llguidance {"no_forcing": true}\nstart: "yes"\n'
    engine.add([request("a", _PROMPT, grammar=text, n=2, temperature=1.0), request("b", _PROMPT)])
    done = []
    while not done:
        done += engine.step()
    engine.add([request("c", [*_PROMPT, 1], ignore_eos=True)])
    engine.step()
    assert ([c.id for c in done], engine.waiting) == (["b"], {"a"})
    compiled.set()
    while engine.has_work:
        done += engine.step()
    assert [(c.id, c.error) for c in done if c.id != "a"] == [("b", None), ("c", None)]
    assert [choice.text for c in done if c.id == "a" for choice in c.choices] == ["yes", "yes"]


def test_an_engine_takes_its_threads_along(tiny_loaded: loader.Loaded) -> None:
    before = set(threading.enumerate())
    text = '%llguidance {"no_forcing": true}\nstart: "yes"\n'
    for open_engine in (FastEngine.over, FallbackEngine):
        loaded = loader.wrap(architectures.build("llama"), tiny_loaded.tokenizer)
        engine = open_engine(loaded, EngineConfig())
        [done] = engine.generate([request("a", _PROMPT, grammar=text)])
        assert done.text == "yes"
        engine.close()
        assert set(threading.enumerate()) <= before


def test_a_choice_that_fails_leaves_no_memory_to_the_others(
    open_subject: exactness.Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = sampling.draw

    def raising(logits: Any, parameters: sampling.Parameters, positions: list[int]) -> Any:
        if seeds.seed_of_choice(7, 2) in parameters.seeds and max(positions) >= 2:
            raise ZeroDivisionError("a fault of the sampler")
        return draw(logits, parameters, positions)

    monkeypatch.setattr(sampling, "draw", raising)
    engine = open_subject("llama").engine()
    [failed] = engine.generate([request("a", _PROMPT, n=4, temperature=1.0, seed=7, ignore_eos=True)])
    assert failed.error is not None
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0
