"""Steps over pages with random sharing, and what their attention must be: each token over all its keys."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from worker.engine import kv
from worker.engine.attention import Scoring
from worker.engine.paged_step import Own, PagedStep, Rows, Shared
from worker.engine.pages import Pool

PAGE = 8
LAYER = 1
Cut = list[tuple[int, int, list[int]]]


@dataclass(frozen=True)
class Row:
    """`queries` tokens after `history` others that are nobody else's, behind the branches of `path`, which
    it shares with all rows whose paths begin alike. `alone`: its own whole pages count as shared, too.
    """

    path: tuple[int, ...]
    history: int
    queries: int
    decodes: bool
    alone: bool = False


@dataclass(frozen=True)
class Shape:
    """`branch_pages[depth]` are the pages of a branch, read in pieces of `piece_pages`. The paddings are
    rows and queries that say nothing; `bounds` what is said of the most queries and keys of a row.
    """

    groups: int = 2
    heads: int = 4
    size: int = 8
    dtype: torch.dtype = torch.float64
    branch_pages: tuple[int, ...] = (2, 1, 3)
    piece_pages: int = 2
    padded_decodes: int = 0
    padded_prefills: int = 0
    padded_shared: int = 0
    bounds: tuple[int, int] | None = None
    cascade: bool = True


@dataclass
class Forest:
    """A step with its inputs, and for each of its real tokens the keys and values [n, G, D] it sees."""

    step: PagedStep
    queries: Tensor
    keys: Tensor
    values: Tensor
    tokens: list[int]
    seen: list[tuple[Tensor, Tensor]]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """At most six rows, with paths of at most three branches."""
    path = st.lists(st.integers(0, 1), max_size=3).map(tuple)
    history = st.integers(0, 3 * PAGE)
    decode = st.builds(Row, path, history | st.just(PAGE - 1), st.just(1), st.just(True), st.booleans())
    prefill = st.builds(Row, path, history, st.integers(1, 2 * PAGE) | st.just(1), st.just(False))
    drawn = draw(st.lists(decode | prefill, min_size=1, max_size=6))
    return sorted(drawn, key=lambda row: not row.decodes)


shapes = st.builds(
    lambda groups, times, **rest: Shape(groups, groups * times, **rest),
    st.integers(1, 3),
    st.integers(1, 3),
    size=st.sampled_from((8, 16)),
    branch_pages=st.tuples(*[st.integers(1, 3)] * 3),
    piece_pages=st.integers(1, 3),
    padded_decodes=st.integers(0, 2),
    padded_prefills=st.integers(0, 1),
    padded_shared=st.integers(0, 2),
    cascade=st.booleans(),
)
scorings = st.builds(
    Scoring,
    st.sampled_from((0.3, 1.0)),
    st.none() | st.integers(1, 4 * PAGE) | st.just(100 * PAGE),
    st.none() | st.sampled_from((2.0, 30.0)),
)


def plant(rows: Sequence[Row], shape: Shape, seed: int) -> Forest:
    """Lay out rows on random pages of a pool that has NaN wherever nothing is."""
    return _Planter(shape, seed).plant(rows)


def expected(forest: Forest, scoring: Scoring) -> Tensor:
    """Return the attention of the real tokens in float64, by the book."""
    results = []
    for token, (k, v) in zip(forest.tokens, forest.seen, strict=True):
        if scoring.window is not None:
            k, v = k[-scoring.window :], v[-scoring.window :]
        times = forest.queries.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(times, 1) for x in (k, v))
        scores = torch.einsum("hd,lhd->hl", forest.queries[token].double(), k) * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        results.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v))
    return torch.stack(results)


def mapped(step: PagedStep, change: Callable[[Tensor], Tensor]) -> PagedStep:
    """Return a step with all its tensors changed."""
    pool = copy.copy(step.pool)
    pool.keys, pool.values = [*map(change, pool.keys)], [*map(change, pool.values)]
    rest = ("ids", "positions", "wanted", "slots", "whole", "own", "shared")
    changed = {name: _mapped(getattr(step, name), change) for name in rest}
    return dataclasses.replace(step, pool=pool, **changed)


def tensors(step: PagedStep) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(step, lambda tensor: found.append(tensor) or tensor)
    return found


def refilled(step: PagedStep, tensors: Sequence[Tensor]) -> PagedStep:
    """Return a step with other tensors, in the order of `tensors(step)`."""
    others: Iterator[Tensor] = iter(tensors)
    return mapped(step, lambda _: next(others))


def _mapped(value: object, change: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Own | Rows | Shared):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value)(**{name: _mapped(each, change) for name, each in fields.items()})
    return value


class _Planter:
    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._random = torch.Generator().manual_seed(seed)
        layout = kv.Layout(((shape.groups, shape.size, shape.size),) * 2, shape.dtype, torch.device("cpu"))
        self._pool = Pool(layout, 400, PAGE)
        for layer in (*self._pool.keys, *self._pool.values):
            layer.fill_(torch.nan)
        self._free = (torch.randperm(399, generator=self._random) + 1).tolist()
        self._branches: dict[tuple[int, ...], tuple[list[int], Tensor, Tensor]] = {}

    def plant(self, rows: Sequence[Row]) -> Forest:
        decodes = sum(row.decodes for row in rows)
        padding = self._shape.padded_decodes if decodes else 0
        heads, size = self._shape.heads, self._shape.size
        whole: Cut = []
        own: Cut = []
        inputs: list[tuple[Tensor, Tensor]] = []
        slots: list[int] = []
        seen: list[tuple[Tensor, Tensor]] = []
        members: dict[tuple[object, ...], list[int]] = {}
        pages_of: dict[tuple[object, ...], list[int]] = {}
        for at, row in enumerate(rows):
            if at == decodes:
                self._pad(padding, whole, own, inputs, slots)
            table, first, pages = self._path(row)
            k, v = self._row(row)
            tokens = range(len(slots), len(slots) + row.queries)
            behind = len(table) * PAGE
            mine = self._take(-(-(row.history + row.queries) // PAGE))
            self._write(mine, k[behind : behind + row.history], v[behind : behind + row.history])
            inputs.append((k[-row.queries :], v[-row.queries :]))
            length, table = k.shape[0], table + mine
            slots += [table[p // PAGE] * PAGE + p % PAGE for p in range(length - row.queries, length)]
            seen += [(k[: p + 1], v[: p + 1]) for p in range(length - row.queries, length)]
            if row.alone and row.decodes and length % PAGE == 0:
                first, pages = len(table), pages | {("alone", at): mine}
            whole.append((row.queries, length, table))
            own.append((row.queries, length - first * PAGE, table[first:]))
            for key, branch in pages.items():
                members.setdefault(key, []).extend(tokens)
                pages_of[key] = branch
        if decodes == len(rows):
            self._pad(padding, whole, own, inputs, slots)
        else:
            whole += [(0, 1, [0])] * self._shape.padded_prefills
            own += [(0, 1, [0])] * self._shape.padded_prefills
        decodes += padding
        total = len(slots)
        real = [token for token in range(total) if token < decodes - padding or token >= decodes]
        some = self._shape.cascade and (members or self._shape.padded_shared)
        shared = self._shared(members, pages_of, total) if some else None
        ids = torch.zeros(total, dtype=torch.long)
        every = self._own(whole, decodes)
        step = PagedStep(
            self._pool,
            *(ids, ids, ids[:1], torch.tensor(slots)),
            every,
            self._own(own, decodes) if shared is not None else every,
            shared,
        )
        queries = self._normal(total, heads, size) * 2
        keys, values = (torch.cat(side) for side in zip(*inputs, strict=True))
        return Forest(step, queries, keys, values, real, seen)

    def _pad(
        self, count: int, whole: Cut, own: Cut, inputs: list[tuple[Tensor, Tensor]], slots: list[int]
    ) -> None:
        for _ in range(count):
            whole.append((1, 1, [0]))
            own.append((1, 1, [0]))
            inputs.append((self._kv(1), self._kv(1)))
            slots.append(0)

    def _path(self, row: Row) -> tuple[list[int], int, dict[tuple[object, ...], list[int]]]:
        """Return the pages of a row's branches, how many they are, and each branch's."""
        prefixes = [row.path[: depth + 1] for depth in range(len(row.path))]
        for prefix in prefixes:
            if prefix not in self._branches:
                pages = self._take(self._shape.branch_pages[len(prefix) - 1])
                branch = pages, self._kv(len(pages) * PAGE), self._kv(len(pages) * PAGE)
                self._write(*branch)
                self._branches[prefix] = branch
        table = [page for prefix in prefixes for page in self._branches[prefix][0]]
        return table, len(table), {prefix: self._branches[prefix][0] for prefix in prefixes}

    def _row(self, row: Row) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a row."""
        before = [self._branches[row.path[: depth + 1]] for depth in range(len(row.path))]
        own = [self._kv(row.history + row.queries) for _ in range(2)]
        return torch.cat([*(b[1] for b in before), own[0]]), torch.cat([*(b[2] for b in before), own[1]])

    def _shared(
        self,
        members: dict[tuple[object, ...], list[int]],
        pages_of: dict[tuple[object, ...], list[int]],
        total: int,
    ) -> Shared:
        cut: Cut = []
        queries: list[int] = []
        for key, tokens in members.items():
            pages, size = pages_of[key], self._shape.piece_pages
            for first in range(0, len(pages), size):
                piece = pages[first : first + size]
                cut.append((len(tokens), len(piece) * PAGE, piece))
                queries += tokens
        places: list[list[int]] = [[] for _ in range(total)]
        for place, token in enumerate(queries):
            places[token].append(place)
        padding = self._shape.padded_shared
        width = max(map(len, places)) + padding
        cut += [(0, padding, [0])] * padding
        filled = [each + [-1] * (width - len(each)) for each in places]
        return Shared(self._rows(cut), torch.tensor(queries + [0] * padding), torch.tensor(filled))

    def _own(self, cut: Cut, decodes: int) -> Own:
        decode = self._rows(cut[:decodes]) if decodes else None
        return Own(decodes, decode, self._rows(cut[decodes:]) if cut[decodes:] else None)

    def _rows(self, cut: Cut) -> Rows:
        queries, keys, tables = ([row[at] for row in cut] for at in range(3))
        width = max(1, *map(len, tables)) if len(tables) > 1 else max(1, len(tables[0]))
        table = torch.tensor([pages + [0] * (width - len(pages)) for pages in tables], dtype=torch.int32)
        starts, ends = (
            torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for counts in (queries, keys)
        )
        most = self._shape.bounds or (max(queries), max(keys))
        return Rows(starts, ends, torch.tensor(keys, dtype=torch.int32), table, *most)

    def _take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def _write(self, pages: list[int], keys: Tensor, values: Tensor) -> None:
        at = torch.tensor([page * PAGE + place for page in pages for place in range(PAGE)], dtype=torch.long)
        for pool, new in ((self._pool.keys, keys), (self._pool.values, values)):
            pool[LAYER].flatten(0, 1)[at[: new.shape[0]]] = new

    def _kv(self, tokens: int) -> Tensor:
        return self._normal(tokens, self._shape.groups, self._shape.size)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, dtype=torch.float64).to(self._shape.dtype)
