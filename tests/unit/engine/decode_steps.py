"""Random decode steps over pages, and a small model in plain torch that computes them: every tensor of a step
decides its results.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import kv, pages
from worker.engine.graph_inputs import Stage
from worker.engine.paged_step import Own, PagedStep, Rows, Shared

PAGE = 4
PAGES = 200
VOCABULARY = 11
_SIZE = 4


def pool(device: str = "cpu") -> pages.Pool:
    """Return pages full of random KV, always the same. The one for padding holds some too."""
    layout = kv.Layout(((1, _SIZE, _SIZE),) * 2, torch.float64, torch.device(device))
    made = pages.Pool(layout, PAGES, PAGE)
    generator = torch.Generator().manual_seed(0)
    for layer in (*made.keys, *made.values):
        layer.copy_(torch.randn(layer.shape, dtype=layer.dtype, generator=generator))
    return made


class Model:
    """Two layers: the first attends to shared and own keys and merges them, the second to the whole ones."""

    def __init__(self, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device)

        self._embedding, self._head = random(VOCABULARY, _SIZE), random(_SIZE, VOCABULARY)
        self._projections = random(2, 3, _SIZE, _SIZE)

    def __call__(self, step: PagedStep) -> Tensor:
        x = self._embedding[step.ids] + torch.sin(step.positions.double())[:, None]
        for layer in range(2):
            step.attention_calls += 1
            q, k, v = x @ self._projections[layer]
            keys = step.pool.keys[layer].view(-1, _SIZE)
            values = step.pool.values[layer].view(-1, _SIZE)
            keys.index_copy_(0, step.slots, k)
            values.index_copy_(0, step.slots, v)
            own, shared = (step.whole, None) if layer else (step.own, step.shared)
            assert own.decode is not None
            found = _attend(q, own.decode.tables, own.decode.lengths, own.decode.most_keys, keys, values)
            x = x + (found if shared is None else _merged(q, found, shared, keys, values))[0]
        return x[step.wanted] @ self._head


def _attend(
    q: Tensor, tables: Tensor, lengths: Tensor, most_keys: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention [n, size] of one query a row, and the log-sum-exp [n] of its scores."""
    slots = (tables.long()[:, :, None] * PAGE + torch.arange(PAGE, device=q.device)).flatten(1)[:, :most_keys]
    scores = (keys[slots] @ q[:, :, None])[:, :, 0]
    scores = scores.masked_fill(torch.arange(slots.shape[1], device=q.device) >= lengths[:, None], -torch.inf)
    return (scores.softmax(-1)[:, None] @ values[slots])[:, 0], scores.logsumexp(-1)


def _merged(
    q: Tensor, own: tuple[Tensor, Tensor], shared: Shared, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    rows, count = shared.rows, len(shared.queries)
    nth = torch.arange(count, dtype=torch.int32, device=q.device)
    row = (torch.searchsorted(rows.starts, nth, right=True) - 1).clamp(max=len(rows.lengths) - 1)
    lengths = rows.ends.diff()  # as kernels that take running sums
    found, sums = _attend(
        q[shared.queries], rows.tables[row], lengths[row], rows.most_keys, keys, values
    )  # what no row has is not computed: whatever was in its memory
    nobody = nth >= rows.starts[-1]
    found, sums = found.masked_fill(nobody[:, None], torch.nan), sums.masked_fill(nobody, torch.nan)
    there, at = shared.places >= 0, shared.places.clamp(min=0)
    outs = torch.where(there[:, :, None], found[at], 0.0)
    weights = torch.where(there, sums[at], -torch.inf)
    weights = torch.cat([weights, own[1][:, None]], 1).softmax(1)
    return (weights[:, None] @ torch.cat([outs, own[0][:, None]], 1))[:, 0], own[1]


@dataclass(frozen=True)
class Sizes:
    """How large a step is: `rows`, how many `pages` each has to itself at most, and how many pages the first
    rows share on each level: fewer rows from level to level. `windows`: the whole tables are given too.
    """

    rows: int
    pages: int = 2
    levels: tuple[int, ...] = ()
    windows: bool = False


def step(seed: int, sizes: Sizes, memory: pages.Pool, stage: Stage) -> PagedStep:
    """Return a random step of these sizes; the same for the same seed, whatever the memory."""
    random = np.random.default_rng(seed)
    fresh = iter((1 + random.permutation(PAGES - 1)).tolist())
    shared: list[list[int]] = [[] for _ in range(sizes.rows)]
    segments: list[tuple[int, list[int]]] = []
    for level, count in enumerate(sizes.levels):
        run = [next(fresh) for _ in range(count)]
        members = max(1, sizes.rows - 2 * level)
        segments.append((members, run))
        for row in range(members):
            shared[row] += run
    own_lengths = random.integers(1, sizes.pages * PAGE + 1, sizes.rows).tolist()
    own = [[next(fresh) for _ in range(-(-length // PAGE))] for length in own_lengths]
    whole_lengths = [len(s) * PAGE + length for s, length in zip(shared, own_lengths, strict=True)]
    last = [length - 1 for length in own_lengths]
    slots = [table[at // PAGE] * PAGE + at % PAGE for table, at in zip(own, last, strict=True)]
    one = [1] * sizes.rows
    own_rows = Own(sizes.rows, _rows(stage, one, own_lengths, own), None)
    whole = own_rows
    if segments and sizes.windows:
        tables = [s + o for s, o in zip(shared, own, strict=True)]
        whole = Own(sizes.rows, _rows(stage, one, whole_lengths, tables), None)
    tokens = (
        random.integers(0, VOCABULARY, sizes.rows),
        np.array(whole_lengths) - 1,
        np.arange(sizes.rows),
        np.array(slots),
    )
    ids, positions, wanted, at = (stage(values.astype(np.int64)) for values in tokens)
    both = _shared(stage, segments, sizes.rows) if segments else None
    return PagedStep(memory, ids, positions, wanted, at, whole, own_rows, both)


def _rows(stage: Stage, queries: list[int], lengths: list[int], tables: list[list[int]]) -> Rows:
    width = max(map(len, tables))
    filled = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
    arrays = (_sums(queries), _sums(lengths), np.array(lengths, dtype=np.int32), filled)
    starts, ends, counts, places = (stage(array) for array in arrays)
    return Rows(starts, ends, counts, places, max(queries), max(lengths))


def _shared(stage: Stage, segments: list[tuple[int, list[int]]], tokens: int) -> Shared:
    members = [count for count, _ in segments]
    places = np.full((tokens, len(segments)), -1, dtype=np.int64)
    for level, first in enumerate(_sums(members)[:-1]):
        places[: members[level], level] = first + np.arange(members[level])
    queries = np.concatenate([np.arange(count) for count in members])
    lengths = [len(run) * PAGE for _, run in segments]
    rows = _rows(stage, members, lengths, [run for _, run in segments])
    return Shared(rows, stage(queries), stage(places))


def _sums(counts: list[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts], dtype=np.int32)
