"""A step that goes to other ranks arrives as it was."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration import paged_steps
from worker.engine import kv, pages, step_wire

_LAYOUT = kv.Layout(((1, 8, 8),), torch.float32, torch.device("cpu"))


@pytest.fixture
def pool() -> pages.Pool:
    return pages.Pool(_LAYOUT, paged_steps.PAGES, paged_steps.PAGE_TOKENS)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and b.is_contiguous() and torch.equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if is_dataclass(a):
        return all(_same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    return bool(a == b)


@pytest.mark.parametrize("index", range(4))
def test_a_step_arrives_with_every_value_and_type(pool: pages.Pool, index: int) -> None:
    sent = paged_steps.steps(pool)[index]
    numbers, values = step_wire.pack(sent)
    assert values.dtype == torch.int64
    arrived = step_wire.unpack([*numbers, 0, 0], values, pool)
    assert _same(sent, arrived)
    assert (arrived.whole is arrived.own) == (sent.whole is sent.own)


def test_the_largest_step_fits_into_a_message(pool: pages.Pool) -> None:
    from worker.engine import parallel

    mixed, shared = paged_steps.steps(pool)[1:3]
    largest = paged_steps.steps(pool)[3]
    largest.own = mixed.own
    largest.whole = paged_steps.steps(pool)[1].own  # another object with all parts
    largest.shared = shared.shared
    numbers, _ = step_wire.pack(largest)
    assert 4 + len(numbers) <= parallel.MESSAGE_NUMBERS
