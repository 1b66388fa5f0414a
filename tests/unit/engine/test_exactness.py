"""Exact on every architecture: whatever the schedule, the tokens that `generate` gives for each prompt."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.engine import architectures, exactness
from tests.unit.engine.conftest import request
from tests.unit.engine.exactness import Schedule
from worker.engine import EngineConfig, Request, loader, opening

NAMES = [name for name in architectures.CONFIGS if name not in architectures.FALL_BACK]
USUAL = {
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_oss",
    "deepseek_v3",
}
"""Those whose random schedules run every day; the others' do in the long tier."""
EVERYDAY = [name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
ASKED_FOR = {
    *("qwen3", "qwen3_moe", "llama", "mistral", "gemma2", "gemma3_text"),
    *("phi3", "gpt2", "gpt_oss", "deepseek_v3"),
}


def long_ones() -> list[Request]:
    """Requests that outgrow the smallest memory together, each longer than any window."""
    head = [(7 * i) % 250 for i in range(40)]
    prompts = [head + [i] * (28 + i) for i in range(1, 5)]
    return [request(str(i), prompt, max_tokens=12, ignore_eos=True) for i, prompt in enumerate(prompts)]


# transformers tells their attention of the window only through the mask, which ours does not get.
UNTOLD: dict[str, dict[str, Any]] = {
    "phimoe": {"sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
    "doge": {"sliding_window": 40, "keep_window_size": 40},
    "qwen2_moe": architectures._MOE
    | {
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
        "shared_expert_intermediate_size": 32,
    },
}
PREEMPTING = Schedule(memory_tokens=200, expected=1, worth_a_part=0, config={"prefill_chunk_tokens": 16})


def check(
    name: str,
    open_subject: exactness.Open,
    requests: list[Request],
    schedule: Schedule,
    backend: str = "auto",
) -> None:
    engine = schedule.open(open_subject(name, backend))
    done = schedule.run(engine, requests)
    exactness.check(name, requests, exactness.tokens_of(done))


def test_the_architectures_are_many_and_the_usual_ones_are_among_them() -> None:
    assert len(NAMES) >= 20
    assert set(NAMES) >= ASKED_FOR
    for name in ("mistral", "gemma2", "gemma3_text", "gpt_oss"):
        assert architectures.CONFIGS[name]["sliding_window"] < min(len(r.prompt_ids) for r in long_ones())


@pytest.mark.parametrize("name", NAMES)
def test_outputs_vary_and_one_forward_tells_what_generate_gives(name: str) -> None:
    assert exactness.reference(name).vary()
    assert exactness.reference(name).agrees_with_generate()


@pytest.mark.parametrize("name", EVERYDAY)
@given(exactness.requests(), exactness.schedules)
@example(long_ones(), PREEMPTING)
@settings(max_examples=3)
def test_any_schedule_is_equal_to_generate(
    open_subject: exactness.Open, name: str, requests: list[Request], schedule: Schedule
) -> None:
    check(name, open_subject, requests, schedule)


# Like heads in all layers, a window, a soft cap with a window, sinks, values of another size than keys.
@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
@given(exactness.requests(), exactness.schedules)
@example(long_ones(), PREEMPTING)
@settings(max_examples=3)
def test_any_schedule_is_equal_to_generate_by_torch_alone(
    open_subject: exactness.Open, name: str, requests: list[Request], schedule: Schedule
) -> None:
    check(name, open_subject, requests, schedule, "dense")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@settings(max_examples=60, report_multiple_bugs=False)
def test_many_schedules_are_equal_to_generate(
    open_subject: exactness.Open, name: str, data: st.DataObject
) -> None:
    requests = data.draw(exactness.requests(most=14))
    check(name, open_subject, requests, data.draw(exactness.schedules))


def test_the_example_preempts(open_subject: exactness.Open) -> None:
    engine = PREEMPTING.open(open_subject("llama"))
    PREEMPTING.run(engine, long_ones())
    assert engine.stats.preemptions > 0
    assert engine.stats.tokens_recomputed > 0


def test_a_prefix_that_is_split_while_it_is_computed_is_computed_to_its_end(
    open_subject: exactness.Open,
) -> None:
    prompts = [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 1], [0, 0, 1, 1]]
    requests = [request(str(i), prompt, max_tokens=4, ignore_eos=True) for i, prompt in enumerate(prompts)]
    # After the first step one of the five common tokens is computed: the third request has only two of them.
    schedule = Schedule(pauses=(0, 0, 1), worth_a_part=0, config={"prefill_chunk_tokens": 1})
    check("llama", open_subject, requests, schedule)


@pytest.mark.parametrize("name", UNTOLD)
def test_a_window_that_only_the_mask_knows_is_not_forgotten(
    name: str, tiny_loaded: loader.Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architectures.CONFIGS, name, architectures.CONFIGS["llama"] | UNTOLD[name])
    engine = opening.over(loader.wrap(architectures.build(name), tiny_loaded.tokenizer), EngineConfig())
    try:
        asked = long_ones()
        done = {c.id: c.token_ids for c in engine.generate(asked)}
        reference = exactness.Reference(name)
        assert done == {r.id: reference.tokens(r.prompt_ids, r.sampling.max_tokens) for r in asked}
    finally:
        engine.close()
