"""The engine over pages, with flash-attn's stand-in, against transformers: any schedule, token for token."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.engine import exactness
from tests.unit.engine.conftest import request
from tests.unit.engine.exactness import Schedule
from tests.unit.engine.test_exactness import PREEMPTING, long_ones
from worker.engine import Request, guards, pages
from worker.engine.attention_flash import FlashAttention
from worker.engine.fast import FastEngine
from worker.engine.flash_standin import StandIn

PAGE_TOKENS = 8
# Grouped heads; a window; a soft cap with a window in every other layer; other norms and head norms.
NAMES = ["llama", "mistral", "gemma2", "qwen3", "phi", "cohere2"]
_subjects: dict[str, exactness.Subject] = {}


def subject(name: str, tokenizer: object) -> exactness.Subject:
    if name not in _subjects:
        backend = FlashAttention(StandIn(PAGE_TOKENS), PAGE_TOKENS)
        _subjects[name] = exactness.Subject.open(name, tokenizer, backend)
    return _subjects[name]


def engine_of(name: str, open_subject: exactness.Open, schedule: Schedule, least_saved: int) -> FastEngine:
    engine = schedule.open(subject(name, open_subject("llama").loaded.tokenizer))
    assert isinstance(engine._memory, pages.Memory)
    engine._stepper.pack.__self__.least_saved = least_saved  # type: ignore[attr-defined]
    return engine


def check(
    name: str,
    open_subject: exactness.Open,
    requests: list[Request],
    schedule: Schedule,
    least_saved: int,
    host_tokens: int,
) -> FastEngine:
    layout = subject(name, open_subject("llama").loaded.tokenizer).runner.layout
    schedule.config["kv_host_bytes"] = host_tokens * layout.token_bytes
    engine = engine_of(name, open_subject, schedule, least_saved)
    done = schedule.run(engine, requests)
    exactness.check(name, requests, exactness.tokens_of(done))
    return engine


@pytest.mark.parametrize("name", NAMES)
@given(
    exactness.requests(),
    exactness.schedules,
    st.sampled_from((1, 1, 4)),
    st.booleans(),
    st.sampled_from((0, 100, 5000)),
)
@example(long_ones(), PREEMPTING, 1, True, 200)
@settings(max_examples=3)
def test_any_schedule_is_equal_to_generate(
    open_subject: exactness.Open,
    name: str,
    requests: list[Request],
    schedule: Schedule,
    least_saved: int,
    cascade: bool,
    host_tokens: int,
) -> None:
    schedule.config["cascade"] = cascade
    check(name, open_subject, requests, schedule, least_saved, host_tokens)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
@given(
    exactness.requests(most=14),
    exactness.schedules,
    st.sampled_from((1, 2, 4)),
    st.sampled_from((0, 100, 5000)),
)
@settings(max_examples=100, report_multiple_bugs=False)
def test_many_schedules_are_equal_to_generate(
    open_subject: exactness.Open,
    name: str,
    requests: list[Request],
    schedule: Schedule,
    least_saved: int,
    host_tokens: int,
) -> None:
    check(name, open_subject, requests, schedule, least_saved, host_tokens)


def test_prompts_that_take_turns_come_back_from_host_memory(open_subject: exactness.Open) -> None:
    size = subject("llama", open_subject("llama").loaded.tokenizer).runner.layout.token_bytes
    schedule = Schedule(memory_tokens=104, config={"kv_host_bytes": 800 * size})
    engine = engine_of("llama", open_subject, schedule, 1)
    prompts = [exactness._TRUNK + exactness._BRANCHES[0], exactness._TAILS[1] + exactness._TAILS[0]]
    for turn in range(6):
        asked = [request("0", prompts[turn % 2], max_tokens=4, ignore_eos=True)]
        done = {c.id: c for c in engine.generate(asked)}
        exactness.check("llama", asked, exactness.tokens_of(done))
    assert engine.stats.prefill_tokens_computed == sum(map(len, prompts)) + 4
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == engine.stats.kv_host_bytes_in_use == 0


def test_shared_pages_are_attended_to_once(open_subject: exactness.Open) -> None:
    engine = engine_of("llama", open_subject, Schedule(), 1)
    shared = []
    pack = engine._stepper.pack

    def packed(batch: object) -> object:
        result = pack(batch)  # type: ignore[arg-type]
        shared.append(result.step.shared)  # type: ignore[union-attr]
        return result

    engine._stepper.pack = packed  # type: ignore[assignment]
    done = Schedule().run(engine, long_ones())
    exactness.check("llama", long_ones(), exactness.tokens_of(done))
    assert any(each is not None for each in shared)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_what_flash_attn_does_not_have_is_refused(name: str, open_subject: exactness.Open) -> None:
    with pytest.raises(guards.Unsupported, match=r"sinks|keys of"):
        subject(name, open_subject("llama").loaded.tokenizer)


def test_the_memory_has_pages_of_the_size_that_flash_attn_takes() -> None:
    assert FlashAttention(StandIn()).page_tokens == 256
    q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(2, 8, 2, 8)
    lengths, table = torch.ones(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="pages of 8"):
        StandIn().flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, block_table=table)
