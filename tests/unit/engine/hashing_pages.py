"""The hashing model over pages: what rows, tables and copies let a query see decides its next token."""

import torch
from torch import Tensor

from tests.unit.engine import hashing
from worker.engine import device, pages, paging, runner
from worker.engine.paged_step import Own, PagedStep

PAGE_TOKENS = 4


class PagedHashRunner(hashing.HashRunner):
    """Keeps (position, token) as keys in pages."""

    def memory(self, budget: int) -> runner.Memory:
        return pages.Memory(self.layout, budget, PAGE_TOKENS)

    def packer(self, memory: runner.Memory, cascade: bool) -> object:  # type: ignore[override]
        assert isinstance(memory, pages.Memory)
        packer = paging.Packer(memory, device.Host().stage, windows=True, cascades=cascade)
        packer.least_saved = 1
        return packer.pack

    def step(self, step: PagedStep) -> Tensor:  # type: ignore[override]
        self.largest_step = max(self.largest_step, len(step.ids))
        step.attention_calls += 1
        if step.copies is not None:
            step.pool.copy(*step.copies)
        pairs = torch.stack([step.positions, step.ids], -1).double()[:, None]
        step.pool.keys[0].flatten(0, 1).index_copy_(0, step.slots, pairs)
        whole, own = _seen(step, step.whole), _seen(step, step.own)
        streamed = _streamed(step)
        logits = torch.zeros(len(step.wanted), hashing.VOCABULARY)
        for row, token in enumerate(step.wanted.tolist()):
            assert whole[token] == sorted([*_shared(step, token), *own[token]])
            logits[row, hashing.hash_of(streamed.get(token, []) + whole[token])] = 1.0
        return logits


def _seen(step: PagedStep, own: Own) -> list[list[tuple[int, int]]]:
    """Return what each token sees of its own rows."""
    found = []
    for rows in (own.decode, own.prefill):
        for row in range(0 if rows is None else len(rows.lengths)):
            assert rows is not None
            keys = _keys(step.pool, rows.tables[row], int(rows.lengths[row]))
            queries = int(rows.starts[row + 1] - rows.starts[row])
            found += [keys[: len(keys) - queries + at + 1] for at in range(queries)]
    return found


def _shared(step: PagedStep, token: int) -> list[tuple[int, int]]:
    shared, found = step.shared, []
    for place in [] if shared is None else [p for p in shared.places[token].tolist() if p >= 0]:
        assert shared is not None
        assert int(shared.queries[place]) == token
        row = int(torch.searchsorted(shared.rows.starts, place, right=True)) - 1
        found += _keys(step.pool, shared.rows.tables[row], int(shared.rows.lengths[row]))
    return found


def _streamed(step: PagedStep) -> dict[int, list[tuple[int, int]]]:
    """Return what tokens see that comes from host memory."""
    if step.streamed is None:
        return {}
    found: list[tuple[int, int]] = []
    for piece in step.streamed.pieces:
        piece.bring(0)()
        assert piece.rows.starts.tolist() == [0, step.streamed.last - step.streamed.first]
        found += _keys(step.pool, piece.rows.tables[0], int(piece.rows.lengths[0]))
    assert len(found) == step.streamed.keys
    return dict.fromkeys(range(step.streamed.first, step.streamed.last), found)


def _keys(pool: pages.Pool, table: Tensor, length: int) -> list[tuple[int, int]]:
    keys = pool.keys[0][table.long()].flatten(0, 1)[:length, 0]
    return [(int(position), int(token)) for position, token in keys.tolist()]
