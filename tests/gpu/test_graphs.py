"""Decode steps that are recorded, and steps that wait for nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.gpu import subjects
from tests.gpu.subjects import Subject
from worker.engine import Request, Sampling
from worker.engine.fast import FastEngine

Open = Callable[..., FastEngine]
_QUIET_STEPS = 20


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("cascade", [True, False])
def test_every_recorded_step_computes_what_it_would_without_its_graph(
    name: str, cascade: bool, device: torch.device, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = _graphs()
    compared: dict[Any, int] = {}
    run = graphs.Graphs.run

    def compare(self: Any, step: Any) -> Any:
        replayed = run(self, step)
        if replayed is not None:
            kept = replayed.float().clone()
            eager = self._forward(step).float()  # writes the same KV to the same places
            off = float((kept - eager).abs().max() / eager.std())
            assert off < 0.2, f"{graphs.Shape.of(step)} is off by {off} standard deviations"
            shape = graphs.Shape.of(step)
            compared[shape] = compared.get(shape, 0) + 1
            replayed.copy_(kept.to(replayed.dtype))
        return replayed

    monkeypatch.setattr(graphs.Graphs, "run", compare)
    subject = subjects.subject(name, device)
    engine = open_engine(subject, cuda_graphs=True, cascade=cascade)
    asked = [
        Request(r.id, r.prompt_ids, Sampling(4 + 3 * i, temperature=0, ignore_eos=True, logprobs=0))
        for i, r in enumerate(subjects.requests())
    ]
    done = subjects.run(engine, asked)
    assert len(compared) >= 4, "as requests end, smaller batches have other graphs"
    assert max(compared.values()) > 1, "a graph is used again with other inputs"
    subjects.check(subject, asked, done)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_results_do_not_depend_on_when_the_host_reads_them(
    ahead: bool, recorded: bool, qwen3: Subject, open_engine: Open
) -> None:
    """Without logprobs, which would make each step wait; with stops that are known a step late."""
    _graphs()
    engine = open_engine(qwen3, run_ahead=ahead, cuda_graphs=recorded)
    asked = subjects.requests(ignore_eos=False, stop=("<|7",))
    subjects.check(qwen3, asked, subjects.run(engine, asked))


def test_decoding_waits_for_nothing(card: torch.device, qwen3: Subject, open_engine: Open) -> None:
    """No step that only decodes makes the host wait for the device, greedy or drawn."""
    _graphs()
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


def _graphs() -> Any:
    subjects.needs("cuda_graphs", "run_ahead")
    from worker.engine import graphs  # type: ignore[attr-defined]

    return graphs
