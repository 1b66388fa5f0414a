"""The compiled draw takes the token that torch's operations take, whatever the row and its neighbours."""

import itertools
from random import Random

import pytest
import torch
from torch import Tensor

from tests.unit.engine.conftest import native_or_skip
from worker.engine import Sampling, sampling, seeds
from worker.engine.native import library

TYPES = [torch.float32, torch.float64]
# Around the sizes of vectors and blocks.
SIZES = [1, 2, 7, 8, 9, 63, 64, 65, 127, 1000, 4097, 50_000]


@pytest.fixture(autouse=True)
def kernels() -> None:
    for dtype in TYPES:
        native_or_skip(dtype)


def randoms(rows: int, size: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, size, dtype=dtype, generator=torch.manual_seed(seed))


def wishes(rows: int, seed: int = 0) -> list[Sampling]:
    """Return parameters of all kinds, most of them with truncations."""
    rng = Random(seed)
    return [
        Sampling(
            1,
            temperature=rng.choice((0.01, 0.3, 0.8, 1.0, 1.5, 20.0)),
            top_p=rng.choice((1.0, 1.0, 0.999, 0.9, 0.5, 1e-9)),
            top_k=rng.choice((0, 0, 1, 2, 20, 300, 5000, 10**6)),
            min_p=rng.choice((0.0, 0.0, 1e-6, 0.05, 0.5, 1.0)),
            seed=rng.randrange(2**64),
        )
        for _ in range(rows)
    ]


def draw(logits: Tensor, rows: list[Sampling]) -> Tensor:
    return sampling.draw(logits, sampling.Parameters.of(rows, "cpu"), [5] * len(rows))


def both(logits: Tensor, rows: list[Sampling]) -> tuple[Tensor, Tensor]:
    with library.disabled():
        expected = draw(logits, rows)
    return draw(logits, rows), expected


def check(logits: Tensor, rows: list[Sampling]) -> None:
    found, expected = both(logits, rows)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_token_is_that_of_torch(size: int, dtype: torch.dtype) -> None:
    rows = wishes(400 if size < 10_000 else 100, size)
    check(randoms(len(rows), size, dtype, size), rows)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("values", [1, 2, 6])
def test_equal_logits_are_kept_or_lost_together(dtype: torch.dtype, values: int) -> None:
    rows = wishes(300, values)
    logits = torch.randint(values, (300, 777), generator=torch.manual_seed(1)).to(dtype)
    check(logits, rows)
    check(-logits - 1000, rows)


@pytest.mark.parametrize("kept", [1, 3, 100])
def test_masked_logits_are_as_if_they_were_not_there(kept: int) -> None:
    rows = wishes(200, kept)
    logits = torch.full((200, 3000), -torch.inf)
    there = torch.stack([torch.randperm(3000, generator=torch.manual_seed(i))[:kept] for i in range(200)])
    logits.scatter_(1, there.sort().values, randoms(200, kept, torch.float32))
    check(logits, rows)
    few = draw(randoms(200, kept, torch.float32), rows)
    assert draw(logits, rows).tolist() == there.sort().values.gather(1, few[:, None])[:, 0].tolist()


@pytest.mark.parametrize("share", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_the_ends_of_the_distribution_are_drawn_alike(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "uniform", lambda seed, position: share)
    for size in (1, 5, 64, 200):
        logits = randoms(100, size)
        logits[:, 1:][:, ::3] = -torch.inf
        check(logits, wishes(100, size))


def test_the_signs_of_zeros_decide_nothing() -> None:
    logits = torch.zeros(1, 200)
    logits[:, ::2] = -0.0
    rows = [Sampling(1, top_k=1, seed=seed) for seed in range(300)]
    drawn = draw(logits.expand(300, -1), rows)
    assert len(set(drawn.tolist())) > 100
    check(logits.expand(300, -1), rows)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 100.0, 1e4])
def test_logits_may_be_of_any_magnitude(scale: float) -> None:
    for dtype in TYPES:
        check(scale * randoms(200, 900, dtype), wishes(200))


def test_each_draw_falls_where_its_uniform_number_says() -> None:
    rows = wishes(300, 9)
    logits = randoms(300, 2000, torch.float32)
    weights = sampling.filtered(logits, sampling.Parameters.of(rows, "cpu"))
    drawn = draw(logits, rows)[:, None]
    uniforms = torch.tensor([[seeds.uniform(row.seed, 5)] for row in rows], dtype=torch.float64)
    after = (weights.cumsum(-1) / weights.sum(-1, keepdim=True)).gather(1, drawn)
    before = after - (weights / weights.sum(-1, keepdim=True)).gather(1, drawn)
    assert bool((before - 1e-9 <= uniforms).all())
    assert bool((uniforms <= after + 1e-9).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_drawn_from_as_it_is(dtype: torch.dtype) -> None:
    rows = wishes(200)
    logits = randoms(200, 3000).to(dtype)
    assert draw(logits, rows).tolist() == draw(logits.double(), rows).tolist()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_neither_neighbours_nor_threads_change_a_row(dtype: torch.dtype) -> None:
    rows, logits = wishes(40), randoms(40, 5000, dtype)
    together = draw(logits, rows).tolist()
    assert [int(draw(logits[i : i + 1], rows[i : i + 1])) for i in range(40)] == together
    assert draw(logits.flip(0), rows[::-1]).tolist() == together[::-1]
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert draw(logits, rows).tolist() == together
    finally:
        torch.set_num_threads(threads)


def test_rows_may_lie_anywhere() -> None:
    rows, logits = wishes(30), randoms(30, 500)
    expected = draw(logits, rows).tolist()
    wider = torch.full((60, 700), torch.inf, dtype=torch.float64)
    wider[::2, 3:503] = logits
    assert draw(wider[::2, 3:503], rows).tolist() == expected
    assert draw(logits.T.contiguous().T, rows).tolist() == expected


def test_no_rows_draw_no_tokens() -> None:
    assert draw(torch.empty(0, 10), []).tolist() == []


def test_a_row_without_numbers_stays_within_the_vocabulary() -> None:
    rows = wishes(100)
    for value, size in itertools.product((torch.nan, torch.inf, -torch.inf), (1, 70, 500)):
        logits = randoms(100, size)
        logits[:, ::2] = value
        assert all(0 <= token < size for token in draw(logits, rows).tolist())
        assert all(0 <= token < size for token in draw(torch.full_like(logits, value), rows).tolist())
