"""Tokens that are chosen without the host are those that the host would choose, or are called doubtful."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.unit.engine import late_device
from worker.engine import Sampling, device, sampling, sampling_ahead
from worker.engine.native import library

SAMPLINGS = st.builds(
    Sampling,
    st.just(1),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    top_k=st.sampled_from([0, 1, 5, 1024, 1025, 10**12]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(-5, 2**70),
)
ROWS = st.lists(SAMPLINGS, min_size=1, max_size=6)


def logits_of(seed: int, rows: int, vocabulary: int, scale: float) -> Tensor:
    return scale * torch.randn(rows, vocabulary, generator=torch.manual_seed(seed))


def decided_by_the_host(logits: Tensor, rows: list[Sampling], positions: list[int]) -> list[int]:
    found: list[int] = logits.argmax(-1).tolist()
    for row, one in enumerate(rows):
        if not one.greedy:
            parameters = sampling.Parameters.of([one], "cpu")
            found[row] = int(sampling.draw(logits[row : row + 1], parameters, positions[row : row + 1]))
    return found


@given(ROWS, st.sampled_from([1, 7, 1024, 1025, 3000]), st.sampled_from([0.01, 1.0, 8.0]), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_tokens_are_those_of_the_host(rows: list[Sampling], vocabulary: int, scale: float, seed: int) -> None:
    logits, positions = logits_of(seed, len(rows), vocabulary, scale), [seed + at for at in range(len(rows))]
    plan = sampling_ahead.Plan.of(rows, positions, device.Host().stage)
    ids, doubtful = sampling_ahead.chosen(logits, plan)
    with library.disabled():
        wanted = decided_by_the_host(logits, rows, positions)
    for row, one in enumerate(rows):
        assert bool(doubtful[row]) or int(ids[row]) == wanted[row]
        assert not doubtful[row] or (vocabulary > 1024 and not one.greedy)
        assert not doubtful[row] or one.top_p < 1 or one.top_k > 1024


def chosen_for(logits: Tensor, *rows: Sampling) -> tuple[list[int], list[bool]]:
    plan = sampling_ahead.Plan.of(rows, [0] * len(rows), device.Host().stage)
    ids, doubtful = sampling_ahead.chosen(logits, plan)
    return ids.tolist(), doubtful.tolist()


def test_only_a_nucleus_longer_than_the_candidates_is_doubtful() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, :100] = 20.0
    rows = [Sampling(1, top_p=0.9), Sampling(1, top_p=0.9), Sampling(1)]
    assert chosen_for(logits, *rows)[1] == [False, True, False]
    assert chosen_for(logits[:, :1024], *rows)[1] == [False, False, False]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", [[Sampling(1, temperature=0.0)] * 2, [Sampling(1, top_p=0.9)] * 2])
def test_a_row_without_finite_logits_is_doubtful_and_its_id_one_of_the_vocabulary(
    bad: float, rows: list[Sampling]
) -> None:
    logits = logits_of(0, 2, 40, 1.0)
    logits[1, 30] = bad
    ids, doubtful = chosen_for(logits, *rows)
    assert doubtful == [False, True]
    assert 0 <= ids[1] < 40
    ids, doubtful = chosen_for(torch.full((2, 40), -torch.inf), *rows)
    assert doubtful == [True, True]
    assert all(0 <= id < 40 for id in ids)


MIXED = [
    Sampling(1, temperature=0.0),
    Sampling(1, temperature=0.7, top_p=0.9, seed=3),
    Sampling(1, top_k=50, seed=4),
    Sampling(1, temperature=0.0),
    Sampling(1, min_p=0.1, seed=5),
]


@pytest.mark.parametrize("rows", [MIXED, MIXED[:1], MIXED[1:3]], ids=["mixed", "greedy", "sampled"])
def test_the_host_reads_nothing_until_it_fetches(rows: list[Sampling]) -> None:
    logits = logits_of(1, len(rows), 3000, 4.0)
    late = late_device.LateDevice()
    plan = sampling_ahead.Plan.of(rows, [0] * len(rows), late.stage)
    ids, doubtful = sampling_ahead.chosen(late.stage(logits.numpy()), plan)
    fetches = late.fetch(ids), late.fetch(doubtful)
    assert [event for event, _ in late.events].count("wait") == 0
    assert (fetches[0].wait().tolist(), fetches[1].wait().tolist()) == chosen_for(logits, *rows)


def test_the_way_of_the_host_would_wait_for_the_device() -> None:
    late = late_device.LateDevice()
    logits = late.stage(logits_of(1, 1, 3000, 4.0).numpy())
    with library.disabled(), pytest.raises(late_device.Synchronised):
        sampling.draw(logits, sampling.Parameters.of([MIXED[1]], "cpu"), [0])


def test_everything_is_on_the_device_of_the_logits() -> None:
    def stage(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to("meta")

    # Operations raise where tensors of two devices meet.
    plan = sampling_ahead.Plan.of(MIXED, [0] * len(MIXED), stage)
    logits = torch.empty(len(MIXED), 3000, dtype=torch.bfloat16, device="meta")
    found = sampling_ahead.chosen(logits, plan)
    assert [(one.device.type, one.dtype) for one in found] == [("meta", torch.int64), ("meta", torch.bool)]
