"""Attention by the compiled kernels: writes KV, then computes all parts of a step in one call a layer."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import kv
from worker.engine.attention import Heads, Rotation
from worker.engine.native import library
from worker.engine.native.library import Kernels, pointer
from worker.engine.step import Part, Step, Write

if TYPE_CHECKING:
    from worker.engine.native.decoder import NativeDecoder

Integers = NDArray[np.int64]
_Step = library.structure(
    "Step",
    "parts part levels level_end indices reach storage writes write offsets tokens",
)
_LAYER_FIELDS = (
    "layer heads groups key_size value_size q k v q_token q_head k_token k_head v_token v_head out softmax"
    " scale softcap window sinks cos sin head_norm epsilon"
)


class NativeAttention:
    """The backend that runs on the compiled kernels, for one dtype."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._layer = layer_structure(kernels)
        self._current: tuple[Step, _Tables] | None = None
        self._scratch = torch.empty(0, dtype=kernels.dtype)

    def __call__(self, step: Step, heads: Heads, /) -> Tensor:
        """See attention.Backend."""
        tables, scoring = self._tables(step), heads.scoring
        q, k, v = map(_rows, (heads.queries, heads.keys, heads.values))
        tokens, count, key_size = q.shape
        out = q.new_empty(tokens, count, v.shape[2])
        softmax = q.new_empty(tokens, count, 2)
        sinks = None if scoring.sinks is None else scoring.sinks.to(q.dtype).contiguous()
        task = self._layer(
            heads.layer,
            count,
            k.shape[1],
            key_size,
            v.shape[2],
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            out.data_ptr(),
            softmax.data_ptr(),
            scoring.scale,
            scoring.softcap or 0.0,
            scoring.window or 0,
            pointer(sinks),
            *((0, 0, 0, 0.0) if heads.rotation is None else _pointers(heads.rotation)),
        )
        self._kernels.attention(ctypes.byref(tables.step), ctypes.byref(task), torch.get_num_threads())
        return out

    def decode(
        self, step: Step, decoder: "NativeDecoder", x: Tensor, cos: Tensor, sin: Tensor, last: bool
    ) -> None:
        """Run a whole layer on x [T, hidden] in place; the last one only for tokens that are wanted."""
        tables = self._tables(step)
        few = last and step.wanted.numel() < x.shape[0]
        task = decoder.task(x, cos, sin, step.wanted if few else None)
        needed = self._kernels.scratch(task, ctypes.c_int64(x.shape[0]))
        if self._scratch.numel() < needed:
            self._scratch = self._scratch.new_empty(needed)
        decoder.point_to(self._scratch.data_ptr())
        self._kernels.decoder(ctypes.byref(tables.step), task, torch.get_num_threads())

    def _tables(self, step: Step) -> "_Tables":
        if self._current is None or self._current[0] is not step:
            self._current = step, _Tables(step)
        return self._current[1]


def layer_structure(kernels: Kernels) -> type[ctypes.Structure]:
    """Return the C struct of what a layer's attention takes."""
    return library.structure("Layer", _LAYER_FIELDS, kernels.real, "scale softcap epsilon")


class _Tables:
    """A step as the kernels read it; holds the arrays that `step` points to."""

    def __init__(self, step: Step) -> None:
        given = (*step.own, *step.shared)
        queries = [_indices(part) for part in given]
        levels = _levels(queries, len(step.own), step.ids.numel())
        order = sorted(range(len(given)), key=levels.__getitem__)
        fields, offset = [], 0
        for each in order:
            part, count = given[each], len(queries[each])
            fields.append((count, offset, part.batched, part.first, part.length))
            offset += count
        ends = np.searchsorted([levels[each] for each in order], range(max(levels) + 1), side="right")
        arrays = [
            _array(fields),
            ends.astype(np.int64),
            np.concatenate([queries[each] for each in order]),
            np.concatenate([_reach(given[each]) for each in order]),
            np.concatenate([_rows_of(given[each].sources, len(queries[each])) for each in order]),
            np.concatenate([_write(write) for write in step.writes]),
            given[0].sources[0].layout.offsets,
        ]
        self._arrays = [np.ascontiguousarray(array) for array in arrays]
        at = [array.ctypes.data for array in self._arrays]
        self.step = _Step(len(order), at[0], len(ends), *at[1:5], len(arrays[5]), *at[5:], step.ids.numel())


def _write(write: Write) -> Integers:
    """Return (token, address, capacity, position) of each token to write."""
    count = write.tokens.stop - write.tokens.start
    to = np.empty((count, 4), dtype=np.int64)
    to[:, 0] = np.arange(write.tokens.start, write.tokens.stop)
    to[:, 1:3] = [storage.row for storage in write.sources]
    to[:, 3] = write.first + np.arange(count) if write.at is None else write.at.numpy()
    return to


def _rows_of(sources: Sequence[kv.Storage], queries: int) -> Integers:
    """Return (address, capacity) of each query's source."""
    return np.broadcast_to(_array([storage.row for storage in sources]), (queries, 2))


def _levels(indices: list[Integers], own: int, tokens: int) -> list[int]:
    """Return when each part's turn is: after all earlier ones that share a token; the own ones are first."""
    level_of = np.zeros(tokens, dtype=np.int64)
    levels = [0] * own
    for each in indices[own:]:
        levels.append(int(level_of[each].max()) + 1)
        level_of[each] = levels[-1]
    return levels


def _indices(part: Part) -> Integers:
    if isinstance(part.tokens, slice):
        return np.arange(part.tokens.start, part.tokens.stop)
    return part.tokens.numpy()


def _reach(part: Part) -> Integers:
    """Return how many keys, from the part's first on, lie at or before each query's position."""
    return (part.positions - part.start + 1).numpy()


def _rows(x: Tensor) -> Tensor:
    """Return heads [T, heads, size] each of which is contiguous."""
    return x if x.stride(2) == 1 else x.contiguous()


def _pointers(rotation: Rotation) -> tuple[int, int, int, float]:
    norm = pointer(rotation.head_norm)
    return rotation.cos.data_ptr(), rotation.sin.data_ptr(), norm, rotation.epsilon


def _array(values: Iterable[Any]) -> Integers:
    return np.array(list(values), dtype=np.int64)
