"""The engine on a real model in float32: exact against one-by-one `generate`, up to ties."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.engine_reference import generate_alone, is_tie
from worker.engine import Engine, EngineConfig, Request, Sampling, loader, smollm2
from worker.engine.fallback import FallbackEngine
from worker.engine.fast import FastEngine

NEW_TOKENS = 24


@pytest.fixture(scope="module", params=[FastEngine, FallbackEngine])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = EngineConfig(device="cpu", fast=request.param is FastEngine)
    engine = Engine.load(str(smollm2.ensure()), config)
    assert isinstance(engine, request.param)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference() -> loader.Loaded:
    """The model as transformers runs it, which no engine has touched."""
    return loader.load(str(smollm2.ensure()), EngineConfig(device="cpu"), "reference")


@pytest.fixture(scope="module")
def alone(reference: loader.Loaded) -> Callable[[tuple[int, ...]], list[int]]:
    """Return what `generate` gives for one prompt; each is asked for once for all engines."""
    return functools.cache(lambda prompt: generate_alone(reference, list(prompt), NEW_TOKENS))


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    """Source code, cut to lengths that share batches and lengths that do not."""
    text = Path(os.__file__).read_text()
    ids: list[int] = engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    starts = iter(range(500, 10_000, 311))
    return [ids[start : start + length] for length in (1, 7, 200, 90, 30, 150, 3) for start in [next(starts)]]


def test_this_model_takes_no_exception(engine: Engine) -> None:
    assert (engine.stats.padding_differs, engine.stats.fallbacks) == (0, isinstance(engine, FallbackEngine))


@pytest.mark.timeout(300)
def test_greedy_is_equal_to_one_by_one_generate(
    engine: Engine,
    reference: loader.Loaded,
    alone: Callable[[tuple[int, ...]], list[int]],
    prompts: list[list[int]],
) -> None:
    greedy = Sampling(NEW_TOKENS, temperature=0.0)
    done = {c.id: c for c in engine.generate(Request(str(i), p, greedy) for i, p in enumerate(prompts))}
    for i, prompt in enumerate(prompts):
        theirs = alone(tuple(prompt))
        ours = done[str(i)].token_ids
        if ours != theirs:
            assert is_tie(reference, prompt, theirs, ours), (i, ours, theirs)


@pytest.mark.timeout(300)
def test_sampled_outputs_do_not_depend_on_batch_mates(engine: Engine, prompts: list[list[int]]) -> None:
    requests = [
        Request(str(i), p, Sampling(12, temperature=0.9, top_p=0.95, seed=100 + i))
        for i, p in enumerate(prompts[:5])
    ]
    together = {c.id: c.token_ids for c in engine.generate(requests)}
    alone = {c.id: c.token_ids for request in requests for c in engine.generate([request])}
    assert together == alone


@torch.inference_mode()
def test_log_probabilities_are_those_of_a_plain_forward(
    engine: Engine, reference: loader.Loaded, prompts: list[list[int]]
) -> None:
    wanted = Sampling(6, temperature=0.9, seed=3, logprobs=5, prompt_logprobs=True, ignore_eos=True)
    for done in engine.generate(Request(str(i), prompt, wanted) for i, prompt in enumerate(prompts)):
        assert done.logprobs is not None
        assert done.prompt_logprobs is not None
        prompt = prompts[int(done.id)]
        under = reference.model(torch.tensor([prompt + done.token_ids])).logits[0].log_softmax(-1)
        scores = [*done.prompt_logprobs[1:], *done.logprobs]
        for at, (score, token) in enumerate(zip(scores, prompt[1:] + done.token_ids, strict=True)):
            assert score is not None
            assert score.logprob == pytest.approx(float(under[at, token]), abs=1e-3)
            highest = under[at].topk(5).values.tolist()
            assert [value for _, value in score.top] == pytest.approx(highest, abs=1e-3)


def test_a_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    chat = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9. Repeat it."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = engine.tokenizer(chat, add_special_tokens=False)["input_ids"]
    (free,) = engine.generate([Request("free", ids, Sampling(40, temperature=0.0))])
    stop = free.text[9:13]
    (stopped,) = engine.generate([Request("stop", ids, Sampling(40, temperature=0.0, stop=(stop,)))])
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
