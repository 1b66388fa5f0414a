"""Log probabilities are those of the softmax, by the compiled kernels and by torch's operations."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.unit.engine.conftest import native_or_skip
from worker.engine import logprobs
from worker.engine.native import library

TYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(params=["native", "torch"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run each test on the compiled kernels, then as on a machine without a compiler."""
    if request.param == "native":
        native_or_skip(torch.float64)
        yield "native"
    else:
        with library.disabled():
            yield "torch"


def check(logits: Tensor, chosen: list[int], most: int) -> None:
    of_chosen, top, of_top = logprobs.logprobs(logits, torch.tensor(chosen), most)
    for row, token in enumerate(chosen):
        values = logits[row].double().tolist()
        high = max(values)
        log_total = high + math.log(math.fsum(math.exp(value - high) for value in values))
        order = sorted(range(len(values)), key=lambda id: (-values[id], id))[:most]
        assert top[row].tolist() == order
        assert of_chosen[row].item() == pytest.approx(values[token] - log_total, abs=1e-9)
        assert of_top[row].tolist() == pytest.approx([values[id] - log_total for id in order], abs=1e-9)


@pytest.mark.parametrize("most", [0, 1, 5, 20])
@pytest.mark.parametrize("size", [1, 5, 20, 64, 1000, 5000])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_they_are_those_of_the_softmax(dtype: torch.dtype, size: int, most: int) -> None:
    logits = (4 * torch.randn(6, size, generator=torch.manual_seed(size))).to(dtype)
    check(logits, [(7 * row) % size for row in range(6)], most)


@pytest.mark.parametrize("values", [1, 3, 40])
def test_the_lower_id_of_equals_comes_first(values: int) -> None:
    logits = torch.randint(values, (8, 900), generator=torch.manual_seed(values)).float()
    logits[:, ::2] += -0.0
    check(logits, [3] * 8, 20)


def test_masked_tokens_have_a_probability_of_zero() -> None:
    logits = torch.full((3, 300), -torch.inf)
    logits[:, 250], logits[:, 7], logits[0, 299] = 1.0, 3.0, 1.0
    of_chosen, top, of_top = logprobs.logprobs(logits, torch.tensor([7, 250, 299]), 5)
    assert top.tolist() == [[7, 250, 299, 0, 1], [7, 250, 0, 1, 2], [7, 250, 0, 1, 2]]
    assert of_chosen[2] == of_top[1, 2] == -torch.inf
    assert of_chosen[1].item() == pytest.approx(-2 - math.log(1 + math.exp(-2)))


def test_far_logits_lose_no_precision() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4, 0.0]], dtype=torch.float64)
    check(logits, [2], 4)


def test_rows_may_lie_anywhere_and_be_none() -> None:
    logits = torch.randn(100, 7, generator=torch.manual_seed(0)).T
    check(logits, list(range(7)), 3)
    check(logits[::2, 10:80], list(range(4)), 3)
    assert [tuple(found.shape) for found in logprobs.logprobs(logits[:0], torch.tensor([]), 2)] == [
        (0,),
        (0, 2),
        (0, 2),
    ]


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    for token in (-1, 10):
        with pytest.raises((IndexError, RuntimeError), match=r"ind|chosen"):
            logprobs.logprobs(torch.zeros(1, 10), torch.tensor([token]), 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [10, 259, 20_000])
def test_logits_that_are_no_numbers_crash_nothing(size: int, value: float) -> None:
    for logits in (torch.full((3, size), value), torch.randn(3, size).index_fill(1, torch.tensor(5), value)):
        _, top, _ = logprobs.logprobs(logits, torch.tensor([1, 2, 3]), 20)
        assert bool(((top >= 0) & (top < size)).all())
