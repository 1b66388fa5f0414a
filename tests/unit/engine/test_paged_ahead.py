"""The engine as on a GPU, over pages, by recorded steps and one ahead: token for token transformers'."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine import exactness
from tests.unit.engine.exactness import Schedule, Subject
from tests.unit.engine.test_ahead import AheadHost
from tests.unit.engine.test_exactness import long_ones
from worker.engine import Request
from worker.engine.attention_flash import FlashAttention
from worker.engine.fast import FastEngine
from worker.engine.flash_standin import StandIn

PAGE_TOKENS = 8


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def subject(request: pytest.FixtureRequest, open_subject: exactness.Open) -> Subject:
    tokenizer = open_subject("llama").loaded.tokenizer
    opened = Subject.open(request.param, tokenizer, FlashAttention(StandIn(PAGE_TOKENS), PAGE_TOKENS))
    opened.runner.device = AheadHost()
    return opened


def run(subject: Subject, requests: list[Request], **config: Any) -> tuple[FastEngine, dict[str, Any]]:
    schedule = Schedule(pauses=(0, 2, 1, 0, 3), memory_tokens=600, config={"max_running": 6, **config})
    engine = schedule.open(subject)
    engine._stepper.pack.__self__.least_saved = 1  # type: ignore[attr-defined]
    return engine, schedule.run(engine, requests)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_tokens_are_equal_to_generate(
    subject: Subject, request: pytest.FixtureRequest, ahead: bool, recorded: bool
) -> None:
    engine, done = run(subject, long_ones(), run_ahead=ahead, cuda_graphs=recorded)
    name = request.node.callspec.params["subject"]
    assert exactness.tokens_of(done) == exactness.wanted(name, long_ones())
    assert (engine.stats.steps_ahead > 0) == ahead
    assert (engine.stats.graph_steps > 0) == recorded
    assert engine.stats.graphs_refused == 0


def test_sampled_tokens_do_not_depend_on_when_they_are_read(subject: Subject) -> None:
    def asked(wanted: dict[str, Any]) -> list[Request]:
        return [
            replace(r, sampling=replace(r.sampling, seed=number, temperature=0.8, **wanted))
            for number, r in enumerate(long_ones())
        ]

    for wanted in ({"top_p": 0.8}, {"top_k": 7, "min_p": 0.02}):
        _, expected = run(subject, asked(wanted), run_ahead=False, cuda_graphs=False)
        engine, done = run(subject, asked(wanted))
        assert engine.stats.steps_ahead > 0
        assert exactness.tokens_of(done) == exactness.tokens_of(expected)
