"""Decode steps that are recorded, and steps that wait for nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.gpu import subjects
from tests.gpu.subjects import Subject
from worker.engine import Request, Sampling, graph_shapes, graphs
from worker.engine import device as engine_device
from worker.engine.fast import FastEngine
from worker.engine.paged_step import PagedStep

Open = Callable[..., FastEngine]
_QUIET_STEPS = 20


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("cascade", [True, False])
def test_every_recorded_step_computes_what_it_would_without_its_graph(
    name: str, cascade: bool, device: torch.device, open_engine: Open
) -> None:
    subject = subjects.subject(name, device)
    engine = open_engine(subject, cascade=cascade, prefill_chunk_tokens=4096, cuda_graphs=False)
    compared = _record(engine)
    asked = [
        Request(r.id, r.prompt_ids, Sampling(4 + 3 * i, temperature=0, ignore_eos=True, logprobs=0))
        for i, r in enumerate(subjects.requests())
    ]
    done = subjects.run(engine, asked)
    assert len(compared) >= 4, "as requests end, smaller batches have other graphs"
    assert any(shape.shared_rows for shape in compared) == cascade
    assert max(compared.values()) > 1, "a graph is used again with other inputs"
    subjects.check(subject, asked, done)


def _record(engine: FastEngine) -> dict[graph_shapes.Shape, int]:
    """Have an engine's decode steps recorded, each compared with its eager twin; return how many of each
    shape were.
    """
    eager = engine._runner.step
    recorded = graphs.Graphs(
        engine_device.of(engine._runner.layout.device), eager, graphs.Limits(64, 8 << 30)
    )
    compared: dict[graph_shapes.Shape, int] = {}

    def step(step: PagedStep) -> torch.Tensor:
        replayed = recorded.run(step)
        if replayed is None:
            return eager(step)
        shape = graph_shapes.Shape.of(step)
        assert shape is not None
        kept, calls = replayed.clone(), step.attention_calls
        expected = eager(step).float()  # writes the same KV to the same places
        step.attention_calls = calls
        off = float((kept.float() - expected).square().mean().sqrt() / expected.std())
        assert off < 0.05, f"{shape} is off by {off} standard deviations"
        compared[shape] = compared.get(shape, 0) + 1
        return kept

    engine._runner.step = step  # type: ignore[method-assign]
    return compared


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_results_do_not_depend_on_when_the_host_reads_them(
    ahead: bool, recorded: bool, qwen3: Subject, open_engine: Open
) -> None:
    """Without logprobs, which would make each step wait; with stops that are known a step late."""
    subjects.needs("cuda_graphs", "run_ahead")
    engine = open_engine(qwen3, run_ahead=ahead, cuda_graphs=recorded)
    asked = subjects.requests(ignore_eos=False, stop=("<|7",))
    subjects.check(qwen3, asked, subjects.run(engine, asked))


def test_decoding_waits_for_nothing(card: torch.device, qwen3: Subject, open_engine: Open) -> None:
    """No step that only decodes makes the host wait for the device, greedy or drawn."""
    subjects.needs("cuda_graphs", "run_ahead")
    engine = open_engine(qwen3, run_ahead=True, cuda_graphs=True)
    prompts = [r.prompt_ids[-30:] for r in subjects.requests()]
    engine.add(
        Request(str(i), ids, Sampling(200, temperature=i % 2 * 0.8, top_p=0.9, seed=i, ignore_eos=True))
        for i, ids in enumerate(prompts)
    )
    engine.expects_more = False
    for _ in range(40):  # prefill, recording, and the first use of whatever is used first
        engine.step()
    with _no_waiting():
        for _ in range(_QUIET_STEPS):
            engine.step()
    assert len(engine.running) == len(prompts), "these were steps that decode for all"


def test_the_check_for_waiting_finds_what_waits(card: torch.device) -> None:
    with _no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=card).item()


@contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
