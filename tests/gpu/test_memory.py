"""What a card's memory is used for, and that it is given back."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.gpu import subjects
from tests.gpu.subjects import Subject
from worker.engine import (
    EngineConfig,
    Request,
    Sampling,
    cuda_device,
    footprint,
    free_memory,
    opening,
    pages,
    runner,
    sizing,
    tiny,
)
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


def test_models_take_turns_on_a_card_and_each_finds_it_empty(
    card: torch.device, tiny_path: Path, tmp_path: Path
) -> None:
    """What a worker of two models does. Each takes all the memory there is for keys and values."""
    sources = [tiny_path, tiny.tiny_model(tmp_path / "other", seed=7)]
    free = []
    for source in sources * 3:
        opened = opening.open_model(str(source), EngineConfig(device=str(card)))
        asked = [Request(str(n), [1, 2, 3 + n], Sampling(8, temperature=0.0)) for n in range(4)]
        assert {each.finish_reason for each in opened.generate(asked)} <= {"stop", "length"}
        opened.close()
        del opened
        free_memory()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    gc.freeze()  # as tests/conftest.py has it
    assert min(free[2:]) > free[1] - (32 << 20), "after what libraries keep from their first use on"


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
    runner.dry_run(model, 2048 + 64)  # libraries take their workspaces
    held = sizing.measured_peak(lambda: runner.dry_run(model, 2048 + 64), card)
    twin = _on_meta(config)
    on_meta = footprint.peak_bytes(lambda: runner.dry_run(twin, 2048 + 64))
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


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_context_beyond_the_pool_is_read_from_host_memory(
    name: str, device: torch.device, open_engine: Open
) -> None:
    """Eight pages in a pool of five, two of which are for what comes back; mistral has a window."""
    subject = subjects.subject(name, device)
    page = 256 * 4 * 2 * 2 * 64 * 2
    engine = open_engine(subject, kv_memory_bytes=5 * page, kv_host_bytes=20 * page)
    prompt = [(7 * i + i // 300) % subjects.VOCABULARY for i in range(1900)]
    fields = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    asked = [Request(str(i), prompt[i:], Sampling(**fields)) for i in range(2)]
    streamed = 0
    pack = engine._stepper.pack

    def packed(batch: Any) -> Any:
        nonlocal streamed
        made = pack(batch)
        streamed += made.step.streamed is not None  # type: ignore[union-attr]
        return made

    engine._stepper.pack = packed  # type: ignore[assignment]
    done = subjects.run(engine, asked)
    assert streamed >= 2 * 24
    assert engine.stats.kv_host_bytes_in_use == 0
    subjects.check(subject, asked, done)


def test_pinned_memory_is_given_back(card: torch.device) -> None:
    here = cuda_device.CudaDevice(card)
    memory = here.pinned((3 << 20) + 5)
    view = memory[100:]
    assert memory.nbytes == (3 << 20) + 5
    assert view.is_pinned()
    del memory
    assert not view.is_pinned()


def test_pages_of_host_memory_are_pinned(card: torch.device, qwen3: Subject, open_engine: Open) -> None:
    engine = open_engine(qwen3, kv_host_bytes=64 << 20)
    assert isinstance(engine._memory, pages.Memory)
    assert engine._memory.host is not None
    gc.collect()
    assert all(layer.is_pinned() for layer in engine._memory.host.pool.tensors)


def test_copies_beside_other_work_are_waited_for(card: torch.device) -> None:
    """Each copy is into a buffer that what was launched before reads for long."""
    here = cuda_device.CudaDevice(card)
    memory = here.pinned(1 << 24)  # it is pinned as long as this is held
    host = memory.view(torch.float32).view(4, -1)
    for row in range(4):
        host[row] = row
    buffers = torch.zeros(2, host.shape[1], device=card)
    seen = torch.zeros(4, host.shape[1], device=card)
    arrived = here.beside(lambda: buffers[0].copy_(host[0], non_blocking=True))
    for row in range(4):
        after = (row + 1) % 4

        def copy(row: int = after) -> None:
            buffers[row % 2].copy_(host[row], non_blocking=True)

        coming = here.beside(copy) if after else arrived
        arrived()
        torch.cuda._sleep(1_000_000)
        seen[row] = buffers[row % 2]
        arrived = coming
    assert [row.unique().tolist() for row in seen.cpu()] == [[0], [1], [2], [3]]
    assert memory.is_pinned()
