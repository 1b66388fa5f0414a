"""What a card's memory is used for, and that it is given back."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.gpu import subjects
from tests.gpu.subjects import Subject
from worker.engine import EngineConfig, footprint, pages, runner, sizing
from worker.engine.fast import FastEngine

Open = Callable[..., FastEngine]


def test_closing_an_engine_gives_its_memory_back(card: torch.device, qwen3: Subject, functions: Any) -> None:
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def round() -> None:
        engine = qwen3.paged(functions)
        subjects.run(engine, subjects.requests())
        engine.close()

    round()  # what libraries keep from their first use on
    before = allocated()
    round()
    assert allocated() - before < 1 << 20


def test_no_request_leaves_pages_behind(qwen3: Subject, open_engine: Open) -> None:
    """Cancelled in the middle of prefill and of decode, and finished ones."""
    engine = open_engine(qwen3, prefill_chunk_tokens=128)
    asked = subjects.requests()
    engine.add(asked)
    for _ in range(3):
        engine.step()
    engine.cancel([request.id for request in asked[::2]])
    while engine.has_work:
        engine.step()
    assert isinstance(engine._memory, pages.Memory)
    engine.forget_prefixes()
    assert engine._memory.free_pages == engine._memory.pool.pages - 1


def test_a_plan_without_a_card_foresees_what_a_step_holds(card: torch.device) -> None:
    """The largest step of a model, measured, is what the meta device says: half as much to twice."""
    config = AutoConfig.for_model("qwen3", **subjects.CONFIGS["qwen3"] | {"vocab_size": 32_000})
    wanted = EngineConfig(max_running=64, prefill_chunk_tokens=2048)
    with torch.device("meta"):
        planned = footprint.of_model(
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval(), wanted
        )
    with card:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert planned.weight_bytes == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    model.set_attn_implementation("longhaul")
    held = sizing.measured_peak(lambda: runner.dry_run(model, 2048 + 64), card)
    on_meta = footprint.peak_bytes(lambda: runner.dry_run(_on_meta(config), 2048 + 64))
    assert on_meta / 2 <= held <= 2 * on_meta


def _on_meta(config: Any) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_attn_implementation("longhaul")
    return model


def test_a_step_that_is_out_of_memory_is_tried_again_with_less(qwen3: Subject, open_engine: Open) -> None:
    asked = subjects.requests(logprobs=0)
    engine = open_engine(qwen3)
    step, refused = engine._runner.step, []

    def short_of_memory(packed: Any) -> Any:
        if len(packed.ids) > 100:
            refused.append(len(packed.ids))
            raise MemoryError("as if the card were full")
        return step(packed)

    engine._runner.step = short_of_memory  # type: ignore[method-assign]
    done = subjects.run(engine, asked)
    assert engine.stats.out_of_memory_splits == len(refused) > 0
    subjects.check(qwen3, asked, done)


def test_prefixes_come_back_from_host_memory(qwen3: Subject, open_engine: Open) -> None:
    """The pool holds one of two prompts: asked for in turn, each is computed once."""
    token_bytes = 4 * 2 * 2 * 64 * 2
    asked = [subjects.requests(logprobs=0)[number] for number in (5, 9)]
    engine = open_engine(qwen3, kv_memory_bytes=4 * 256 * token_bytes, kv_host_bytes=64 << 20)
    computed, done = [], {}
    for turn in range(6):
        before = engine.stats.prefill_tokens_computed
        done |= {c.id: c for c in engine.generate([asked[turn % 2]])}
        computed.append(engine.stats.prefill_tokens_computed - before)
    assert max(computed[2:]) < 300, f"computed again: {computed}"
    subjects.check(qwen3, asked, done)
