"""What the engine does around vLLM, on a twin of it; with vLLM itself: the integration test of this name."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from jobs import errors
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from tests.unit.engine import hashing
from tests.unit.engine.conftest import request
from tests.unit.engine.vllm_twin import VllmTwin
from worker import engine as engines
from worker.engine import Completion, EmbeddingRequest, EngineConfig, loader
from worker.engine.vllm_engine import VllmEngine

PROMPT = [5, 6, 7]


@pytest.fixture
def open_engine(tiny_loaded: loader.Loaded) -> Callable[..., VllmEngine]:
    def open_engine(twin: VllmTwin, ends: frozenset[int] = frozenset(), **config: Any) -> VllmEngine:
        return VllmEngine(twin, tiny_loaded.tokenizer, 64, ends, EngineConfig(**config))

    return open_engine


def expected(prompt: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(hashing.next_token(prompt + made))
    return made


def all_of(engine: VllmEngine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {completion.id: completion for completion in engine.step()}
    return done


def test_requests_come_back_with_tokens_texts_and_counts(
    open_engine: Callable[..., VllmEngine],
) -> None:
    engine = open_engine(VllmTwin())
    done = {c.id: c for c in engine.generate(request(str(n), [n, 1], max_tokens=n + 1) for n in range(5))}
    assert {id: c.token_ids for id, c in done.items()} == {str(n): expected([n, 1], n + 1) for n in range(5)}
    assert {c.finish_reason for c in done.values()} == {"length"}
    assert all(c.text == engine.tokenizer.decode(c.token_ids) for c in done.values())
    assert all(c.timings.first_token and c.timings.admitted <= c.timings.first_token for c in done.values())
    stats = engine.stats
    assert (stats.tokens_sampled, stats.prefill_tokens_computed) == (15, 10)
    assert (stats.requests_added, stats.requests_finished, stats.steps, stats.decode_steps) == (5, 5, 5, 4)


def test_a_stop_string_ends_the_text_before_it_and_the_request_in_vllm(
    open_engine: Callable[..., VllmEngine],
) -> None:
    twin = VllmTwin()
    engine = open_engine(twin)
    tokens = expected(PROMPT, 8)
    stop = engine.tokenizer.decode(tokens[3:5])
    whole = engine.tokenizer.decode(tokens)
    [done] = engine.generate([request("a", PROMPT, max_tokens=8, stop=(stop,))])
    assert (done.text, done.finish_reason) == (whole[: whole.find(stop)], "stop")
    assert twin.aborted == ["0"]
    assert not twin.given


def test_an_end_token_ends_the_output(open_engine: Callable[..., VllmEngine]) -> None:
    tokens = expected(PROMPT, 4)
    engine = open_engine(VllmTwin(), frozenset(tokens[2:3]))
    [done] = engine.generate([request("a", PROMPT, max_tokens=8)])
    first = tokens.index(tokens[2])
    assert (done.token_ids, done.finish_reason) == (tokens[: first + 1], "stop")
    assert done.text == engine.tokenizer.decode(tokens[:first])


def test_no_more_are_handed_over_than_may_run(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin()
    engine = open_engine(twin, max_running=2)
    engine.add(request(str(n), PROMPT, max_tokens=2) for n in range(5))
    engine.step()
    assert (engine.running, engine.waiting) == ({"0", "1"}, {"2", "3", "4"})
    assert len(twin.all) == 2
    assert engine.room() == 0
    assert len(all_of(engine)) == 5


def test_nothing_is_handed_over_while_vllm_keeps_some_waiting(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin(memory=1)
    engine = open_engine(twin, max_running=4)
    engine.add(request(str(n), PROMPT, max_tokens=3) for n in range(2))
    engine.step()
    engine.add([request("late", PROMPT, max_tokens=3)])
    engine.step()
    assert engine.waiting == {"late"}
    assert len(all_of(engine)) == 3


def test_requests_that_were_lost_vanish_before_vllm_sees_them(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin()
    engine = open_engine(twin)
    asked: list[str] = []

    def admit(ids: list[str]) -> list[str]:
        asked.extend(ids)
        return ["b"]

    engine.on_admit = admit
    done = {c.id for c in engine.generate(request(id, PROMPT, max_tokens=2) for id in "abc")}
    assert (asked, done, len(twin.all)) == (["a", "b", "c"], {"a", "c"}, 2)


def test_a_failed_admission_leaves_the_requests_waiting(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin()
    engine = open_engine(twin)

    def admit(ids: list[str]) -> list[str]:
        raise ConnectionError

    engine.on_admit = admit
    engine.add([request("a", PROMPT)])
    with pytest.raises(ConnectionError):
        engine.step()
    assert (engine.waiting, twin.all) == ({"a"}, [])


def test_a_cancelled_request_is_aborted_in_vllm(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin()
    engine = open_engine(twin)
    engine.add([request("a", PROMPT), request("b", PROMPT, max_tokens=3)])
    engine.step()
    engine.cancel(["a"])
    [cancelled] = engine.step()
    assert (cancelled.id, cancelled.finish_reason) == ("a", "cancelled")
    assert cancelled.token_ids == expected(PROMPT, 1)
    assert twin.aborted == ["0"]
    assert all_of(engine)["b"].token_ids == expected(PROMPT, 3)


def test_an_id_that_is_added_again_starts_anew(open_engine: Callable[..., VllmEngine]) -> None:
    engine = open_engine(VllmTwin())
    engine.add([request("a", PROMPT, max_tokens=5)])
    engine.step()
    engine.add([request("a", [9], max_tokens=2)])
    assert all_of(engine)["a"].token_ids == expected([9], 2)


def test_choices_run_as_requests_with_seeds_of_their_own(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin()
    engine = open_engine(twin)
    [done] = engine.generate([request("a", PROMPT, temperature=1.0, n=3, seed=4, max_tokens=2)])
    assert len(done.choices) == 3
    assert len({given.sampling["seed"] for given in twin.all}) == 3
    assert twin.all[0].sampling["seed"] == 4


def test_greedy_choices_are_computed_once(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin()
    [done] = open_engine(twin).generate([request("a", PROMPT, n=3, max_tokens=2)])
    assert (len(done.choices), len(twin.all)) == (3, 1)


def test_tenants_share_no_prefixes_and_cached_tokens_count(
    open_engine: Callable[..., VllmEngine],
) -> None:
    engine = open_engine(VllmTwin())
    cached = []
    for root in ("one", "one", "two"):
        asked = engines.Request("a", PROMPT, engines.Sampling(2, 0.0), root=root)
        cached += [done.cached_tokens for done in engine.generate([asked])]
    assert cached == [0, 2, 0]
    assert (engine.stats.prefix_tokens_reused, engine.stats.prefill_tokens_computed) == (2, 7)


def test_log_probabilities_come_with_each_token(open_engine: Callable[..., VllmEngine]) -> None:
    [done] = open_engine(VllmTwin()).generate([request("a", PROMPT, max_tokens=3, logprobs=1)])
    assert done.logprobs is not None
    assert [(found.token_id, found.logprob) for found in done.logprobs] == [
        (id, -0.5) for id in expected(PROMPT, 3)
    ]


@pytest.mark.parametrize(
    "wanted", [{"grammar": "start: /a/"}, {"prompt_logprobs": True}, {"temperature": 3.0}, {"max_tokens": 64}]
)
def test_what_cannot_run_is_an_error_of_its_own(
    open_engine: Callable[..., VllmEngine], wanted: dict[str, Any]
) -> None:
    twin = VllmTwin()
    engine = open_engine(twin)
    done = {c.id: c for c in engine.generate([request("bad", PROMPT, **wanted), request("good", PROMPT)])}
    assert (done["bad"].finish_reason, done["good"].finish_reason) == ("error", "length")
    assert len(twin.all) == 1


def test_embeddings_are_refused(open_engine: Callable[..., VllmEngine]) -> None:
    [done] = open_engine(VllmTwin()).generate([EmbeddingRequest("a", (PROMPT,))])
    assert done.error == "engine vllm does not embed: embeddings need engine auto"


def test_what_vllm_itself_refuses_fails_alone(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin()
    twin.refuses = "too odd\nfor me"
    done = {c.id: c for c in open_engine(twin).generate([request("bad", PROMPT), request("good", PROMPT)])}
    assert done["bad"].error == "vLLM refuses it: too odd"
    assert done["good"].error is None


def test_what_vllm_ends_for_reasons_of_its_own_is_an_error(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin()
    twin.fails = "abort"
    [done] = open_engine(twin).generate([request("a", PROMPT)])
    assert done.error == "vLLM ended it: abort"


def test_closing_twice_closes_vllm_once(open_engine: Callable[..., VllmEngine]) -> None:
    twin = VllmTwin()
    engine = open_engine(twin)
    engine.add([request("a", PROMPT)])
    engine.step()
    engine.close()
    engine.close()
    assert (twin.closed, engine.has_work) == (1, False)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_loading_says_what_to_install(tiny_path: Any) -> None:
    model = ModelSettings(source=str(tiny_path), engine="vllm")
    with pytest.raises(errors.ModelUnavailable, match=r"pip install 'longhaul\[vllm\]'"):
        engines.open_engine("m", model, Settings(models={"m": model}))


def test_the_fingerprint_of_a_model_tells_its_engine() -> None:
    of = {
        ModelSettings.model_validate({"source": "s", "engine": e}).fingerprint("m") for e in ("auto", "vllm")
    }
    assert len(of) == 2
