"""The tensors a recorded step reads: always the same ones, filled with each step and with padding behind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import pages
from worker.engine.graph_shapes import Shape
from worker.engine.paged_step import Own, PagedStep, Rows, Shared

Stage = Callable[[NDArray[Any]], Tensor]


class Inputs:
    """A step of a shape that is padding all over, until it is filled.

    A padded token is token 0 at position 0; its KV goes to page 0, and its one key lies there. A padded
    shared row has no queries, and one key on page 0.
    """

    def __init__(self, stage: Stage, shape: Shape, pool: pages.Pool) -> None:
        def zeros() -> _Filled:
            return _Filled(stage(np.zeros(shape.rows, dtype=np.int64)))

        self._ids, self._positions, self._wanted, self._slots = zeros(), zeros(), zeros(), zeros()
        size = pool.page_tokens
        self._own = _DecodeRows(stage, shape.rows, shape.own, size)
        self._whole = _DecodeRows(stage, shape.rows, shape.whole, size) if shape.whole else None
        self._shared = _SharedRows(stage, shape, size) if shape.shared_rows else None
        own = Own(shape.rows, self._own.rows, None)
        self.step = PagedStep(
            pool,
            self._ids.tensor,
            self._positions.tensor,
            self._wanted.tensor,
            self._slots.tensor,
            own if self._whole is None else Own(shape.rows, self._whole.rows, None),
            own,
            None if self._shared is None else self._shared.shared,
        )

    def fill(self, step: PagedStep) -> None:
        """Launch the copies of a step of this shape."""
        assert step.own.decode is not None
        assert step.whole.decode is not None
        self._ids.fill(step.ids)
        self._positions.fill(step.positions)
        self._wanted.fill(step.wanted)
        self._slots.fill(step.slots)
        self._own.fill(step.own.decode)
        if self._whole is not None:
            self._whole.fill(step.whole.decode)
        if self._shared is not None:
            assert step.shared is not None
            self._shared.fill(step.shared)


class _Filled:
    """A tensor with values at its beginning, in each dimension, and what it had at first behind them."""

    def __init__(self, padding: Tensor) -> None:
        self.tensor = padding.clone()
        self._padding = padding
        self._filled: torch.Size | None = None

    def fill(self, values: Tensor) -> None:
        if values.shape != self._filled:
            self.tensor.copy_(self._padding)
            self._filled = values.shape
        self.tensor[tuple(slice(size) for size in values.shape)].copy_(values)


class _Sums:
    """Running sums [n + 1], continued by `step` for each row of padding."""

    def __init__(self, stage: Stage, rows: int, step: int) -> None:
        self._steps = stage(np.arange(rows + 1, dtype=np.int32) * np.int32(step))
        self.tensor = self._steps.clone()

    def fill(self, values: Tensor) -> None:
        self.tensor[: len(values)].copy_(values)
        padded = len(self.tensor) - len(values)
        if padded:
            torch.add(self._steps[1 : padded + 1], values[-1], out=self.tensor[len(values) :])


class _KeyRows:
    """Where the keys of rows lie; padding is one key on page 0."""

    def __init__(self, stage: Stage, rows: int, width: int) -> None:
        self.ends = _Sums(stage, rows, 1)
        self.lengths = _Filled(stage(np.ones(rows, dtype=np.int32)))
        self.tables = _Filled(stage(np.zeros((rows, width), dtype=np.int32)))

    def with_queries(self, starts: Tensor, most_queries: int, page_tokens: int) -> Rows:
        tables = self.tables.tensor
        most_keys = tables.shape[1] * page_tokens
        return Rows(starts, self.ends.tensor, self.lengths.tensor, tables, most_queries, most_keys)

    def fill(self, rows: Rows) -> None:
        self.ends.fill(rows.ends)
        self.lengths.fill(rows.lengths)
        self.tables.fill(rows.tables)


class _DecodeRows:
    """Rows of one query each: where these are never changes."""

    def __init__(self, stage: Stage, rows: int, width: int, page_tokens: int) -> None:
        self._keys = _KeyRows(stage, rows, width)
        self.rows = self._keys.with_queries(stage(np.arange(rows + 1, dtype=np.int32)), 1, page_tokens)
        self.fill = self._keys.fill


class _SharedRows:
    """Shared keys: no row has more queries than there are tokens, and no token more than `levels` copies."""

    def __init__(self, stage: Stage, shape: Shape, page_tokens: int) -> None:
        self._keys = _KeyRows(stage, shape.shared_rows, shape.shared)
        self._starts = _Sums(stage, shape.shared_rows, 0)
        self._queries = _Filled(stage(np.zeros(shape.rows * shape.levels, dtype=np.int64)))
        self._places = _Filled(stage(np.full((shape.rows, shape.levels), -1, dtype=np.int64)))
        rows = self._keys.with_queries(self._starts.tensor, shape.rows, page_tokens)
        self.shared = Shared(rows, self._queries.tensor, self._places.tensor)

    def fill(self, shared: Shared) -> None:
        self._keys.fill(shared.rows)
        self._starts.fill(shared.rows.starts)
        self._queries.fill(shared.queries)
        self._places.fill(shared.places)
