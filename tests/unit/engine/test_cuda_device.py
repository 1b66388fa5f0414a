"""Copies that do not wait keep their values; recordings that fail leave the device as it was."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.engine import decode_steps, late_device
from worker.engine import cuda_device, device, graphs, ring

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_an_array_is_the_callers_again_at_once() -> None:
    late = late_device.LateDevice()
    values = np.arange(5)
    staged = late.stage(values)
    values[:] = -1
    assert late.fetch(staged).wait().tolist() == [0, 1, 2, 3, 4]


def test_no_buffer_is_taken_before_the_copy_from_it_is_done() -> None:
    late = late_device.LateDevice()
    fetches = [late.fetch(late.stage(np.full(n + 1, n))) for n in range(20)]
    assert late.buffers.buffers == 20
    for n, fetch in enumerate(fetches):
        assert fetch.wait().tolist() == [n] * (n + 1)


def test_a_device_that_is_not_behind_needs_few_buffers() -> None:
    late = late_device.LateDevice()
    for n in range(20):
        pair = late.stage(np.full(600, n)), late.stage(np.full(3, n))
        for staged in pair:
            assert set(late.fetch(staged).wait().tolist()) == {n}
    assert (late.buffers.buffers, late.buffers.bytes) == (2, 4096 + 8192)


def test_a_buffer_is_taken_again_while_later_copies_go_on() -> None:
    late = late_device.LateDevice()
    fetches = [late.fetch(late.stage(np.arange(3))) for _ in range(3)]
    fetches[0].wait()
    late.stage(np.arange(3))
    assert late.buffers.buffers == 3
    late.stage(np.arange(3))
    assert late.buffers.buffers == 4


def test_a_buffer_that_is_taken_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_device._Buffer, "done", lambda self: True)
    late = late_device.LateDevice()
    fetches = [late.fetch(late.stage(np.full(3, n))) for n in range(2)]
    assert fetches[0].wait().tolist() == [1, 1, 1]


def test_a_wait_is_for_its_own_values_only() -> None:
    late = late_device.LateDevice()
    first = late.fetch(late.stage(np.arange(3)))
    late.fetch(late.stage(np.arange(4)) * 2)
    first.wait()
    assert late.launched == 3


class Streams:
    """Stands in for torch.cuda where there is none: which stream is current, and what happens on it.

    Leaving a recording that failed raises, and leaves its stream current, as torch's does.
    """

    def __init__(self) -> None:
        self.stream = "engine"
        self.events: list[str] = []
        self.pools = 0
        self.fails = False

    def current_stream(self, *_: Any) -> Any:
        return _Stream(self, self.stream)

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.stream = stream.name
        self.events.append(f"record in {pool} {capture_error_mode}")
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.stream = "engine"


class _Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self._streams = streams
        self.name = name

    def wait_stream(self, other: "_Stream") -> None:
        self._streams.events.append(f"{self.name} waits for {other.name}")


class _Graph:
    def replay(self) -> None:
        pass


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: _Stream(made, "side"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.new_pool)
    monkeypatch.setattr(torch.cuda, "stream", made.on)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: made.events.append(f"waiting: {mode}")
    )
    return made


def test_a_recording_is_warmed_up_on_its_stream_after_what_was_launched(streams: Streams) -> None:
    def run() -> Tensor:
        streams.events.append(f"run on {streams.stream}")
        return torch.zeros(1)

    card = cuda_device.CudaDevice(torch.device("cuda", 0))
    for _ in range(2):
        card.record(run)
    once = [
        "side waits for engine",
        "run on side",
        "waiting: error",
        "run on side",
        "waiting: 0",
        "engine waits for side",
        "record in 1 thread_local",
        "run on side",
    ]
    assert streams.events == once * 2


def test_a_recording_that_fails_leaves_the_stream_and_its_pool(streams: Streams) -> None:
    card = cuda_device.CudaDevice(torch.device("cuda", 0))
    streams.fails = True
    with pytest.raises(RuntimeError, match="previous error"):
        card.record(lambda: torch.zeros(1))
    assert streams.stream == "engine"
    streams.fails = False
    card.record(lambda: torch.zeros(1))
    assert [event for event in streams.events if "record" in event][-1] == "record in 2 thread_local"


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_cuda
def test_a_card_keeps_what_is_staged_and_waits_for_nothing() -> None:
    card = cuda_device.CudaDevice(torch.device("cuda", 0))
    values = np.arange(1000)
    with nothing_waits():
        busy = torch.ones(4096, 4096, device="cuda")
        fetches = []
        for n in range(50):
            busy = busy @ busy * 0
            values[:] = n
            fetches.append(card.fetch(card.stage(values) + busy[0, 0].long()))
    assert card.buffers.buffers > 1
    for n, fetch in enumerate(fetches):
        assert set(fetch.wait().tolist()) == {n}


@pytest.mark.gpu
@needs_cuda
def test_a_card_repeats_a_recording_and_refuses_what_waits() -> None:
    card = cuda_device.CudaDevice(torch.device("cuda", 0))
    given = card.stage(np.arange(4.0))

    def waits() -> Tensor:
        return given * given.sum().item()

    repeat, result = card.record(lambda: given * 2 + 1)
    with pytest.raises(RuntimeError):
        card.record(waits)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    again, other = card.record(lambda: given + 5)
    given.copy_(card.stage(np.full(4, 10.0)))
    repeat()
    again()
    assert card.fetch(result).wait().tolist() == [21.0] * 4
    assert card.fetch(other).wait().tolist() == [15.0] * 4
    with pytest.raises(RuntimeError, match="stages an array"):
        card.record(lambda: card.stage(np.zeros(1)))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("levels", [(), (4, 3)], ids=str)
def test_graphs_of_a_card_are_the_eager_steps(levels: tuple[int, ...]) -> None:
    card, model = cuda_device.CudaDevice(torch.device("cuda", 0)), decode_steps.Model("cuda")
    memory, eager = decode_steps.pool(device="cuda"), decode_steps.pool()
    made = graphs.Graphs(card, model, graphs.Limits(10, 2**33))
    for seed, rows in enumerate((16, 9, 12, 3, 10)):
        sizes = decode_steps.Sizes(rows, 2, levels, windows=True)
        logits = made.run(decode_steps.step(seed, sizes, memory, card.stage))
        assert logits is not None
        wanted = decode_steps.Model()(decode_steps.step(seed, sizes, eager, device.Host().stage))
        assert torch.allclose(logits.cpu(), wanted, rtol=1e-9, atol=1e-12)
    assert made.counts.replayed == 5


def test_buffers_are_as_large_as_asked_for() -> None:
    made = ring.Ring(late_device._Buffer)
    assert [made.take(size).bytes.size for size in (0, 1, 4096, 4097, 70000)] == [4096] * 3 + [8192, 131072]
