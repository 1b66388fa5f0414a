"""The engine on a card against float32 on the CPU, and against itself in other ways of running."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import subjects
from tests.gpu.subjects import Subject
from worker.engine import Engine, EngineConfig, tiny
from worker.engine.fast import FastEngine

Open = Callable[..., FastEngine]


@pytest.mark.parametrize("name", subjects.CONFIGS)
def test_tokens_and_logprobs_are_those_of_float32_but_for_rounding(
    name: str, device: torch.device, open_engine: Open
) -> None:
    subject = subjects.subject(name, device)
    asked = subjects.requests(logprobs=0)
    subjects.check(subject, asked, subjects.run(open_engine(subject), asked))


@pytest.mark.parametrize(
    "fields",
    [
        {"share_prefixes": False},
        {"cascade": False},
        {"prefill_chunk_tokens": 64},
        {"prefill_chunk_tokens": 4096},
        {"max_running": 3},
    ],
    ids=str,
)
def test_ways_of_running_differ_by_rounding_alone(
    fields: dict[str, Any], qwen3: Subject, open_engine: Open
) -> None:
    asked = subjects.requests(logprobs=0)
    subjects.check(qwen3, asked, subjects.run(open_engine(qwen3, **fields), asked))


def test_a_check_that_passes_for_wrong_tokens_is_no_check(qwen3: Subject, open_engine: Open) -> None:
    """What the tests above rest on: other prompts' tokens are found out."""
    asked = subjects.requests(logprobs=0)
    done = subjects.run(open_engine(qwen3), asked)
    swapped = done | {"0": done["12"], "12": done["0"]}
    with pytest.raises(AssertionError):
        subjects.check(qwen3, asked, swapped)


def test_sharing_computes_each_prefix_once(qwen3: Subject, open_engine: Open) -> None:
    from bench import limit

    asked = subjects.requests()
    prompts = [request.prompt_ids for request in asked]
    computed = {}
    for share in (True, False):
        engine = open_engine(qwen3, share_prefixes=share)
        subjects.run(engine, asked)
        computed[share] = engine.stats.prefill_tokens_computed
    assert computed[True] == limit.distinct_tokens(prompts)
    assert computed[False] == sum(map(len, prompts))


def test_pages_that_are_preempted_are_computed_again(qwen3: Subject, open_engine: Open) -> None:
    """With memory for few requests; their outputs cross into a new page."""
    token_bytes = 4 * 2 * 2 * 64 * 2
    asked = subjects.requests(logprobs=0, max_tokens=230)[10:16]
    engine = open_engine(qwen3, kv_memory_bytes=4 * 256 * token_bytes)
    engine._scheduler._lengths.expected = lambda job, max_tokens: 1  # type: ignore[method-assign]
    done = subjects.run(engine, asked)
    assert engine.stats.preemptions > 0
    subjects.check(qwen3, asked, done)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_attention_is_right_where_there_is_no_flash_attn(
    dtype: torch.dtype, device: torch.device
) -> None:
    subject = subjects.subject("gemma2", device, dtype)
    asked = subjects.requests(logprobs=0)
    engine = subject.engine("dense")
    try:
        found = subjects.check(subject, asked, subjects.run(engine, asked))
    finally:
        engine.close()
    if dtype == torch.float32:
        assert float(found.ours.max()) < 1e-3, "products in float32 must not be rounded to TF32"


def test_a_model_from_files_runs_on_the_device(tmp_path: Path, device: torch.device) -> None:
    path = tiny.tiny_model(tmp_path)
    engine = Engine.load(str(path), EngineConfig(device=str(device), kv_memory_bytes=64 << 20))
    try:
        assert isinstance(engine, FastEngine)
        asked = [subjects.Request("a", list(range(40)), subjects.Sampling(max_tokens=8, ignore_eos=True))]
        assert len(next(iter(engine.generate(asked))).token_ids) == 8
    finally:
        engine.close()
