"""Attention by the compiled kernels: writes KV, then computes all parts of a step in one call a layer."""

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.attention import Rotation, Scoring
from worker.engine.native import library
from worker.engine.native.library import Kernels, pointer
from worker.engine.step import Part, Step, Write

if TYPE_CHECKING:
    from worker.engine.native.decoder import NativeDecoder

Integers = NDArray[np.int64]
_Step = library.structure(
    "Step",
    "parts part levels level_end indices reach writes write pointers capacity layers tokens",
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

    def __call__(
        self, step: Step, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring,
        rotation: Rotation | None = None,
    ) -> Tensor:  # fmt: skip
        """See attention.Backend."""
        tables = self._tables(step)
        q, k, v = _rows(q), _rows(k), _rows(v)
        tokens, heads, key_size = q.shape
        out = q.new_empty(tokens, heads, v.shape[2])
        softmax = q.new_empty(tokens, heads, 2)
        sinks = None if scoring.sinks is None else scoring.sinks.to(q.dtype).contiguous()
        task = self._layer(
            layer,
            heads,
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
            *((0, 0, 0, 0.0) if rotation is None else _pointers(rotation)),
        )
        self._kernels.attention(ctypes.byref(tables.step), ctypes.byref(task), torch.get_num_threads())
        return out

    def decode(self, step: Step, decoder: "NativeDecoder", x: Tensor, cos: Tensor, sin: Tensor, last: bool) -> None:
        """Run a whole layer on x [T, hidden] in place; the last one only for tokens whose logits are wanted."""
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
        self._sources: dict[int, tuple[int, Any]] = {}
        parts = [(_indices(part), part) for part in (*step.own, *step.shared)]
        levels = _levels([indices for indices, _ in parts], len(step.own), step.ids.numel())
        order = sorted(range(len(parts)), key=levels.__getitem__)
        fields, reaches, offset = [], [], 0
        for each in order:
            indices, part = parts[each]
            source = self._source(part.source)
            queries = len(indices)
            fields.append(
                (queries, offset, part.batched, source, part.rows.start, part.first, part.length)
            )
            reaches.append(_reach(part, queries))
            offset += queries
        ends = np.searchsorted([levels[each] for each in order], range(max(levels) + 1), side="right")
        part = _array(fields)
        indices, reach = np.concatenate([parts[each][0] for each in order]), np.concatenate(reaches)
        writes = np.concatenate([self._write(write) for write in step.writes])
        sources = [source for _, source in self._sources.values()]
        pointers = np.stack([pointers_of(source) for source in sources])
        capacities = _array([source.keys[0].shape[2] for source in sources])
        arrays = [part, _array(ends), indices, reach, writes, pointers, capacities]
        self._arrays = [np.ascontiguousarray(array) for array in arrays]
        at = [array.ctypes.data for array in self._arrays]
        self.step = _Step(
            len(part), at[0], len(ends), at[1], at[2], at[3], len(writes), at[4], at[5], at[6],
            pointers.shape[1], step.ids.numel(),
        )  # fmt: skip

    def _source(self, source: Any) -> int:
        return self._sources.setdefault(id(source), (len(self._sources), source))[0]

    def _write(self, write: Write) -> Integers:
        """Return (token, source, row, position) of each token to write."""
        tokens = np.arange(write.tokens.start, write.tokens.stop)
        to = np.empty((len(tokens), 4), dtype=np.int64)
        to[:, 0], to[:, 1] = tokens, self._source(write.source)
        if write.rows is None or write.at is None:
            to[:, 2], to[:, 3] = write.row, write.first + np.arange(len(tokens))
        else:
            to[:, 2], to[:, 3] = write.rows.numpy(), write.at.numpy()
        return to


def pointers_of(source: Any) -> Integers:
    """Return the addresses [layers, 2] of a source's keys and values, looked up once."""
    known = source.pointers
    if known is None:
        pairs = zip(source.keys, source.values, strict=True)
        known = source.pointers = _array([(keys.data_ptr(), values.data_ptr()) for keys, values in pairs])
    return known  # type: ignore[no-any-return]


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
    return part.tokens.numpy()  # type: ignore[no-any-return]


def _reach(part: Part, queries: int) -> Integers:
    """Return how many keys, from the part's first on, lie at or before each query's position."""
    return (part.positions - part.start + 1).numpy()  # type: ignore[no-any-return]


def _rows(x: Tensor) -> Tensor:
    """Return heads [T, heads, size] each of which is contiguous."""
    return x if x.stride(2) == 1 else x.contiguous()


def _pointers(rotation: Rotation) -> tuple[int, int, int, float]:
    norm = pointer(rotation.head_norm)
    return rotation.cos.data_ptr(), rotation.sin.data_ptr(), norm, rotation.epsilon


def _array(values: Iterable[Any]) -> Integers:
    return np.array(list(values), dtype=np.int64)
