"""A request that makes the sampler, a grammar or the tokenizer raise fails alone, in both engines."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from worker.engine import (
    Completion,
    Engine,
    EngineConfig,
    Request,
    Sampling,
    choosing,
    grammar,
    loader,
    logprobs,
    sampling,
)
from worker.engine.fallback import FallbackEngine
from worker.engine.fast import FastEngine
from worker.engine.rows import RowState
from worker.engine.types import Row

_PROMPT = [(7 * i) % 250 for i in range(20)]
_BAD_SEED = 666
Open = Callable[..., Engine]


@pytest.fixture(params=["fast", "fallback"])
def open_engine(request: pytest.FixtureRequest, tiny_loaded: loader.Loaded) -> Iterator[Open]:
    opened: list[Engine] = []

    def open_engine(tokenizer: Any = tiny_loaded.tokenizer) -> Engine:
        loaded = loader.wrap(architectures.build("llama"), tokenizer)
        fast = request.param == "fast"
        opened.append(
            FastEngine.over(loaded, EngineConfig()) if fast else FallbackEngine(loaded, EngineConfig())
        )
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


def _run(engine: Engine, bad: Request) -> tuple[Completion, list[list[int]]]:
    """Run a bad request among good ones; return what became of it and the tokens of the others."""
    good = [
        request(str(i), [*_PROMPT, i], temperature=1.0, seed=i, max_tokens=6, ignore_eos=True)
        for i in range(4)
    ]
    done = {c.id: c for c in engine.generate([*good[:2], bad, *good[2:]])}
    assert [done[each.id].error for each in good] == [None] * len(good)
    return done[bad.id], [done[each.id].token_ids for each in good]


def _break_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the third draw of the bad seed raise."""
    draw = sampling.draw

    def raising(logits: torch.Tensor, parameters: sampling.Parameters, positions: list[int]) -> torch.Tensor:
        if _BAD_SEED in parameters.seeds and max(positions) >= 2:
            raise ZeroDivisionError("a fault of the sampler")
        return draw(logits, parameters, positions)

    monkeypatch.setattr(sampling, "draw", raising)


def test_a_sampler_that_raises(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = request("bad", [*_PROMPT, 9], temperature=1.0, seed=_BAD_SEED, max_tokens=6, ignore_eos=True)
    whole, expected = _run(open_engine(), bad)
    assert whole.error is None
    _break_the_sampler(monkeypatch)
    failed, others = _run(open_engine(), bad)
    assert failed.finish_reason == "error"
    assert failed.error == "ZeroDivisionError: a fault of the sampler"
    assert others == expected


class _Failing(grammar.Constraint):
    """Fails in the way its text names."""

    compiled = True

    def __init__(self, where: str) -> None:
        self._where = where

    def _reach(self, where: str) -> None:
        if where == self._where:
            raise grammar.GrammarFailed(f"a fault in {where}")

    def prepare(self) -> None:
        self._reach("prepare")

    def restrict(self, logits: Any) -> None:
        self._reach("restrict")
        if self._where == "nothing allowed":
            logits.fill_(-torch.inf)

    def take(self, token_id: int) -> bool:
        self._reach("take")
        return False


@pytest.mark.parametrize("where", ["open", "prepare", "restrict", "take", "nothing allowed"])
def test_a_grammar_that_raises(open_engine: Open, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def open_grammar(self: grammar.Grammars, text: str) -> grammar.Constraint:
        if text == "open":
            raise grammar.GrammarFailed("a fault in open")
        return _Failing(text)

    monkeypatch.setattr(grammar.Grammars, "open", open_grammar)
    failed, _ = _run(open_engine(), request("bad", [*_PROMPT, 9], grammar=where, max_tokens=6))
    assert failed.finish_reason == "error"
    expected = "no token is allowed" if where == "nothing allowed" else f"a fault in {where}"
    assert expected in (failed.error or "")


def test_a_tokenizer_that_raises(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine()
    decode = engine.tokenizer.decode

    def raising(ids: Any, **options: Any) -> str:
        if len(ids) == 3:
            raise ValueError("a fault of the tokenizer")
        return str(decode(ids, **options))

    monkeypatch.setattr(engine.tokenizer, "decode", raising)
    failed, _ = _run(engine, request("bad", [*_PROMPT, 9], max_tokens=3, ignore_eos=True))
    assert failed.error == "ValueError: a fault of the tokenizer"


def test_a_bias_for_a_token_that_is_not_there(open_engine: Open) -> None:
    failed, _ = _run(open_engine(), request("bad", [*_PROMPT, 9], logit_bias=((10**6, 1.0),)))
    assert "logit_bias has token ids outside" in (failed.error or "")


def test_one_choice_that_fails_fails_the_request(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    _break_the_sampler(monkeypatch)
    bad = request("bad", [*_PROMPT, 9], temperature=1.0, seed=_BAD_SEED, n=3, max_tokens=6, ignore_eos=True)
    failed, _ = _run(open_engine(), bad)
    assert failed.id == "bad"
    assert failed.finish_reason == "error"
    assert failed.others == ()


def test_prompt_logprobs_of_logits_that_are_no_numbers(open_engine: Open) -> None:
    engine = open_engine()
    model = engine._loaded.model if isinstance(engine, FallbackEngine) else engine._runner._model  # type: ignore
    with torch.no_grad():
        model.get_input_embeddings().weight[251] = torch.nan
    bad = request("bad", [*_PROMPT, 251, 9], max_tokens=6, logprobs=20, prompt_logprobs=True)
    failed, _ = _run(engine, bad)
    assert failed.error == "the model's logits are not finite numbers"


def test_a_prompt_whose_log_probabilities_raise(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(logits: torch.Tensor, chosen: Any, most: Any) -> Any:
        raise ZeroDivisionError("a fault of the log probabilities")

    monkeypatch.setattr(logprobs, "of_tokens", raising)
    failed, _ = _run(open_engine(), request("bad", [*_PROMPT, 9], logprobs=1, prompt_logprobs=True))
    assert failed.error == "ZeroDivisionError: a fault of the log probabilities"


def test_a_special_token_that_the_model_does_not_have_ends_nothing(
    open_engine: Open, tiny_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.add_tokens([AddedToken("<extra>", special=True)])
    assert tokenizer.get_added_vocab()["<extra>"] >= architectures.VOCABULARY
    engine = open_engine(tokenizer)
    done, _ = _run(engine, request("a", [*_PROMPT, 9], stop=("<extra>",), min_tokens=3, max_tokens=6))
    assert (done.error, len(done.token_ids)) == (None, 6)


def test_a_lost_device_is_no_fault_of_a_row(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> torch.Tensor:
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(sampling, "draw", lost)
    asked = [request(str(i), [*_PROMPT, i], temperature=1.0) for i in range(2)]
    with pytest.raises(torch.AcceleratorError):
        list(open_engine().generate(asked))


def test_ids_that_look_like_those_of_choices(open_engine: Open) -> None:
    asked = [
        request("a", _PROMPT, n=3, temperature=1.0, max_tokens=3),
        *(request(f"a#{i}", _PROMPT, max_tokens=3) for i in range(3)),
    ]
    done = list(open_engine().generate(asked))
    assert sorted((c.id, c.error) for c in done) == [(r.id, None) for r in asked]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_no_change_away(tiny_loaded: loader.Loaded, dtype: torch.dtype) -> None:
    """A bias of less than the distance between two numbers decides, and a large factor overflows nothing."""
    logits = torch.tensor([[1.0, 100.0, 100.0, 2.0], [1.0, 900.0, 2.0, 3.0]], dtype=dtype)
    wanted = (
        Sampling(1, temperature=0, logit_bias=((2, 0.02),), logprobs=1),
        Sampling(1, temperature=0, repetition_penalty=0.01),
    )
    rows = [Row(Request(str(i), [1], each)) for i, each in enumerate(wanted)]
    states = [RowState(row, tiny_loaded.tokenizer, frozenset()) for row in rows]
    assert choosing.choose(states, logits) == [2, 1]
    assert [state.failure for state in states] == [None, None]
