"""Four steps over pages of 8 tokens that use all that a step has, and what each row of logits follows."""

import torch
from torch import Tensor

from worker.engine import pages
from worker.engine.paged_step import Own, PagedStep, Rows, Shared

PAGE_TOKENS = 8
PAGES = 7
FIRST = [(7 * i + 3) % 250 for i in range(14)]
SECOND = FIRST[:8] + [(11 * i + 5) % 250 for i in range(14)]
FORK = [*FIRST[:13], 77]
"""Like FIRST but for its last token: it takes a copy of the page where it leaves it."""


def steps(pool: pages.Pool) -> list[PagedStep]:
    return [_prefill(pool), _mixed(pool), _decode_shared(pool), _decode_fork(pool)]


def sequences() -> list[list[int]]:
    """Return the tokens up to each row of logits, in order."""
    return [
        FIRST[:11],
        *(FIRST[:12], SECOND[:21]),
        *(FIRST[:13], SECOND[:22]),
        *(FIRST[:14], FORK[:14]),
    ]


def _prefill(pool: pages.Pool) -> PagedStep:
    own = Own(0, None, _rows([(11, 11, [1, 2])]))
    return _step(pool, FIRST[:11], range(11), [10], [*range(8, 19)], own)


def _mixed(pool: pages.Pool) -> PagedStep:
    own = Own(1, _rows([(1, 12, [1, 2])]), _rows([(13, 21, [1, 3, 4])]))
    slots = [19, *range(24, 37)]
    return _step(pool, [FIRST[11], *SECOND[8:21]], [11, *range(8, 21)], [0, 13], slots, own)


def _decode_shared(pool: pages.Pool) -> PagedStep:
    whole = Own(2, _rows([(1, 13, [1, 2]), (1, 22, [1, 3, 4])]), None)
    own = Own(2, _rows([(1, 5, [2]), (1, 14, [3, 4])]), None)
    shared = Shared(_rows([(2, 8, [1])]), _longs([0, 1]), _longs([[0], [1]]))
    return _step(pool, [FIRST[12], SECOND[21]], [12, 21], [0, 1], [20, 37], own, whole, shared)


def _decode_fork(pool: pages.Pool) -> PagedStep:
    own = Own(2, _rows([(1, 14, [1, 2]), (1, 14, [1, 5])]), None)
    copies = _longs(range(16, 24)), _longs(range(40, 48))
    return _step(pool, [FIRST[13], FORK[13]], [13, 13], [0, 1], [21, 45], own, copies=copies)


def _step(
    pool: pages.Pool,
    ids: object,
    positions: object,
    wanted: object,
    slots: object,
    own: Own,
    whole: Own | None = None,
    shared: Shared | None = None,
    copies: tuple[Tensor, Tensor] | None = None,
) -> PagedStep:
    tokens = [_longs(values) for values in (ids, positions, wanted, slots)]
    return PagedStep(pool, *tokens, own if whole is None else whole, own, shared, copies)


def _rows(rows: list[tuple[int, int, list[int]]]) -> Rows:
    """Return rows of (queries, keys, pages)."""
    width = max(len(row[2]) for row in rows)
    return Rows(
        _sums([row[0] for row in rows]),
        _sums([row[1] for row in rows]),
        torch.tensor([row[1] for row in rows], dtype=torch.int32),
        torch.tensor([row[2] + [0] * (width - len(row[2])) for row in rows], dtype=torch.int32),
        max(row[0] for row in rows),
        max(row[1] for row in rows),
    )


def _sums(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def _longs(values: object) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)  # type: ignore[call-overload]
