"""A decode step by a recorded graph is the step itself, whatever step the graph was recorded for."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.engine import decode_steps, late_device
from tests.unit.engine.decode_steps import Sizes
from worker.engine import device, graphs, pages, sampling_ahead
from worker.engine.graph_shapes import Shape
from worker.engine.paged_step import Own, PagedStep
from worker.engine.types import Sampling

MANY = graphs.Limits(100, 2**40)
MODEL = decode_steps.Model()
HOST = device.Host()
DEVICES = [device.Host, late_device.LateDevice]
Results = tuple[list[Tensor], Tensor]


def kv(memory: pages.Pool) -> Tensor:
    return torch.stack([layer[1:] for layer in (*memory.keys, *memory.values)])


def eager(steps: Sequence[Sizes], forward: graphs.Forward = MODEL) -> Results:
    """Return the logits of random steps, one after the other, and the KV afterwards."""
    memory = decode_steps.pool()
    found = [forward(decode_steps.step(seed, sizes, memory, HOST.stage)) for seed, sizes in enumerate(steps)]
    return found, kv(memory)


def replayed(steps: Sequence[Sizes], on: Any, forward: graphs.Forward = MODEL) -> Results:
    """Return the same by graphs, with the host ahead of the device by all steps."""
    memory, made = decode_steps.pool(), graphs.Graphs(on, forward, MANY)
    fetches, shapes, padded = [], set(), 0
    for seed, sizes in enumerate(steps):
        step = decode_steps.step(seed, sizes, memory, on.stage)
        shape = Shape.of(step)
        assert shape is not None
        logits = made.run(step)
        assert logits is not None
        assert step.attention_calls == 2
        fetches.append(on.fetch(logits.clone()))
        shapes.add(shape)
        padded += shape.rows - sizes.rows
    counts = made.counts
    assert (counts.replayed, counts.captured, counts.padding_rows) == (len(steps), len(shapes), padded)
    found = [torch.from_numpy(fetch.wait()) for fetch in fetches]
    return found, kv(memory)


def same(a: Results, b: Results) -> bool:
    pairs = zip([*a[0], a[1]], [*b[0], b[1]], strict=True)
    return all(x.shape == y.shape and torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in pairs)


sizes = st.builds(
    Sizes,
    st.integers(1, 20),
    st.integers(1, 3),
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    st.booleans(),
)


@pytest.mark.parametrize("make", DEVICES)
@given(st.lists(sizes, min_size=2, max_size=6))
@settings(max_examples=5, deadline=None)
def test_any_steps_by_graphs_are_the_eager_ones(make: Callable[[], Any], steps: list[Sizes]) -> None:
    assert same(replayed(steps, make()), eager(steps))


@pytest.mark.parametrize("make", DEVICES)
@pytest.mark.parametrize("levels", [(), (4,), (4, 3), (4, 3, 3, 4)], ids=str)
@pytest.mark.parametrize("windows", [False, True])
def test_what_a_larger_step_left_in_the_inputs_does_not_reach_a_smaller_one(
    make: Callable[[], Any], levels: tuple[int, ...], windows: bool
) -> None:
    rows = (16, 9, 12, 16, 10)
    fewer = (levels, levels[:1] + levels[2:], levels, levels[:3], levels)
    steps = [Sizes(n, 2, some, windows) for n, some in zip(rows, fewer, strict=True)]
    assert same(replayed(steps, make()), eager(steps))


def bakes_a_bound(step: PagedStep) -> Tensor:
    assert step.own.decode is not None
    return MODEL(step) * step.own.decode.most_keys


def bakes_the_batch_size(step: PagedStep) -> Tensor:
    return MODEL(step) / len(step.ids)


def reads_padding(step: PagedStep) -> Tensor:
    assert step.own.decode is not None
    return MODEL(step) + step.own.decode.lengths.sum()


class Counting:
    """Takes a number of Python's that varies: recorded, it does not."""

    def __init__(self) -> None:
        self._steps = 0

    def __call__(self, step: PagedStep) -> Tensor:
        self._steps += 1
        return MODEL(step) + self._steps


@pytest.mark.parametrize("make", [lambda: bakes_a_bound, lambda: bakes_the_batch_size, lambda: reads_padding])
@pytest.mark.parametrize("on", DEVICES)
def test_a_forward_that_takes_a_padded_size_for_a_value_is_noticed(
    make: Callable[[], graphs.Forward], on: Callable[[], Any]
) -> None:
    steps = [Sizes(3, 3)] * 4
    assert not same(replayed(steps, on(), make()), eager(steps, make()))


def test_a_forward_with_a_recorded_value_is_noticed_by_the_late_device() -> None:
    steps = [Sizes(4, 1), Sizes(4, 1)]
    assert not same(replayed(steps, late_device.LateDevice(), Counting()), eager(steps, Counting()))


def waits(step: PagedStep) -> Tensor:
    assert step.own.decode is not None
    return MODEL(step)[: int(step.own.decode.lengths.max()) + 10**6]


def stages(on: Any) -> graphs.Forward:
    return lambda step: MODEL(step) + on.stage(step.pool.keys[0][0, 0, 0].numpy())


@pytest.mark.parametrize("forward", [lambda on: waits, stages], ids=["waits", "stages"])
def test_what_cannot_be_recorded_runs_eagerly_and_is_tried_once(
    forward: Callable[[Any], graphs.Forward], caplog: pytest.LogCaptureFixture
) -> None:
    late = late_device.LateDevice()
    made = graphs.Graphs(late, forward(late), MANY)
    memory = decode_steps.pool()
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            assert made.run(decode_steps.step(seed, Sizes(2, 1), memory, late.stage)) is None
    assert dataclasses.asdict(made.counts) == {
        **dataclasses.asdict(graphs.Counts()),
        "refused": 1,
        "eager_decodes": 3,
    }
    assert len(caplog.records) == 1
    late.finish()
    assert torch.equal(kv(memory), kv(decode_steps.pool()))


@pytest.mark.parametrize(("code", "lost"), [(700, True), (901, False)])
def test_a_lost_device_is_not_taken_for_a_failed_recording(code: int, lost: bool) -> None:
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # type: ignore[attr-defined]

    def forward(step: PagedStep) -> Tensor:
        raise error

    made = graphs.Graphs(HOST, forward, MANY)
    step = decode_steps.step(0, Sizes(2), decode_steps.pool(), HOST.stage)
    if not lost:
        assert made.run(step) is None
        return
    with pytest.raises(torch.AcceleratorError):
        made.run(step)


def run_rows(made: graphs.Graphs, on: Any, memory: pages.Pool, *rows: int) -> list[bool]:
    """Tell of steps of so many rows whether they ran by a graph."""
    return [made.run(decode_steps.step(n, Sizes(n, 1), memory, on.stage)) is not None for n in rows]


def test_there_are_no_more_graphs_than_allowed() -> None:
    made, memory = graphs.Graphs(HOST, MODEL, graphs.Limits(2, 2**40)), decode_steps.pool()
    assert run_rows(made, HOST, memory, 1, 2, 4, 8, 4, 2, 1) == [True, True, False, False, False, True, True]
    counts = made.counts
    assert (counts.captured, counts.refused, counts.eager_decodes, counts.replayed) == (2, 2, 3, 4)
    made.clear()
    assert run_rows(made, HOST, memory, 8, 4, 1) == [True, True, False]


def test_a_graph_that_is_not_used_any_more_makes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_STALE_STEPS", 3)
    late, memory = late_device.LateDevice(recording_bytes=100), decode_steps.pool()
    made = graphs.Graphs(late, MODEL, graphs.Limits(2, 2**40))
    assert run_rows(made, late, memory, 1, 2, 4, 2, 4, 2) == [True, True, False, True, True, True]
    assert (made.counts.captured, made.counts.refused, made.counts.bytes) == (3, 1, 200)
    assert run_rows(made, late, memory, 1) == [False]


def test_a_forward_that_cannot_be_recorded_is_not_tried_in_all_sizes() -> None:
    late, memory = late_device.LateDevice(), decode_steps.pool()
    made = graphs.Graphs(late, waits, MANY)
    assert run_rows(made, late, memory, 1, 2, 4, 8) == [False] * 4
    assert made.counts.refused == 2


def test_graphs_hold_no_more_memory_than_allowed() -> None:
    late, memory = late_device.LateDevice(recording_bytes=100), decode_steps.pool()
    made = graphs.Graphs(late, MODEL, graphs.Limits(10, 250))
    assert run_rows(made, late, memory, 1, 2, 4, 4) == [True, True, False, False]
    assert (made.counts.bytes, made.counts.captured, made.counts.refused) == (200, 2, 1)


def test_a_step_with_prefill_is_not_for_graphs() -> None:
    made = graphs.Graphs(HOST, MODEL, MANY)
    step = decode_steps.step(0, Sizes(2), decode_steps.pool(), HOST.stage)
    rows = step.own.decode
    mixed = Own(2, rows, rows)
    assert made.run(dataclasses.replace(step, own=mixed, whole=mixed)) is None
    assert made.run(dataclasses.replace(step, own=Own(0, None, rows), whole=Own(0, None, rows))) is None
    assert made.counts == graphs.Counts()


def test_pages_of_another_pool_are_refused() -> None:
    made = graphs.Graphs(HOST, MODEL, MANY)
    made.run(decode_steps.step(0, Sizes(2), decode_steps.pool(), HOST.stage))
    with pytest.raises(ValueError, match="another pool"):
        made.run(decode_steps.step(0, Sizes(2), decode_steps.pool(), HOST.stage))


@pytest.mark.parametrize("make", DEVICES)
def test_pages_are_copied_before_the_step_reads_them(make: Callable[[], Any]) -> None:
    on = make()
    memory, copied = decode_steps.pool(), decode_steps.pool()
    step = decode_steps.step(5, Sizes(3), copied, HOST.stage)
    assert step.own.decode is not None
    target, source = step.own.decode.tables[0, :1].long(), torch.tensor([decode_steps.PAGES - 1])
    copied.copy(source, target)
    wanted = MODEL(step)
    late = decode_steps.step(5, Sizes(3), memory, on.stage)
    late.copies = on.stage(source.numpy()), on.stage(target.numpy())
    logits = graphs.Graphs(on, MODEL, MANY).run(late)
    assert logits is not None
    assert torch.allclose(torch.from_numpy(on.fetch(logits).wait()), wanted)


def test_two_steps_in_flight_have_the_tokens_of_one_at_a_time() -> None:
    """The ids of a step go into the next one, which is launched before the host knows them."""
    late, steps = late_device.LateDevice(), 6
    found = chained(late, steps)
    assert found == chained(HOST, steps)
    assert len(set(map(tuple, found))) > 2
    order = [event for event in late.events if event[0] in ("replay", "wait")]
    waits = [at for at, event in enumerate(order) if event[0] == "wait"]
    assert [order[:at].count(("replay", 0)) for at in waits] == [*range(2, steps + 1), steps]


def chained(on: Any, steps: int) -> list[list[int]]:
    made, memory = graphs.Graphs(on, MODEL, MANY), decode_steps.pool()
    found, ids, pending = [], None, None
    for position in range(steps):
        rows = [Sampling(1, temperature=3.0, seed=seed) for seed in range(4)]
        plan = sampling_ahead.Plan.of(rows, [position] * 4, on.stage)
        step = decode_steps.step(1, Sizes(4), memory, on.stage)
        logits = made.run(step if ids is None else dataclasses.replace(step, ids=ids))
        assert logits is not None
        ids, _ = sampling_ahead.chosen(logits, plan)
        fetch = on.fetch(ids)
        found += [] if pending is None else [pending.wait().tolist()]
        pending = fetch
    assert pending is not None
    return [*found, pending.wait().tolist()]


def test_logits_that_are_kept_uncopied_are_those_of_the_next_step() -> None:
    late, memory = late_device.LateDevice(), decode_steps.pool()
    made = graphs.Graphs(late, MODEL, MANY)
    first = made.run(decode_steps.step(0, Sizes(4, 1), memory, late.stage))
    assert first is not None
    before = late.fetch(first)
    second = made.run(decode_steps.step(1, Sizes(4, 1), memory, late.stage))
    assert second is not None
    early, kept, last = (fetch.wait() for fetch in (before, late.fetch(first), late.fetch(second)))
    assert (kept == last).all()
    assert (early != last).any()
