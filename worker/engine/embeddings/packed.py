"""Embeds texts that lie side by side, each with attention to itself: no padding, and no KV is kept."""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import kv, runner
from worker.engine.embeddings.headless import Headless, ModelEncoder
from worker.engine.embeddings.pooling import Pooling
from worker.engine.embeddings.whole import WholeAttention
from worker.engine.native import library
from worker.engine.step import Part, Step, Write


class PackedEncoder(ModelEncoder):
    """Texts side by side, without padding, through the attention of the fast engine. No KV is kept."""

    def __init__(self, model: Any, how: Pooling) -> None:
        """Take a model whose attention is ours."""
        super().__init__(how)
        headless = model if isinstance(model, Headless) else Headless(model)
        self._device = headless.base.device
        native = library.kernels(headless.base.dtype, self._device) is not None
        self._runner = runner.ModelRunner(headless, "auto" if native else WholeAttention())
        layout = self._runner.layout
        self._layout = _OneLayer(layout.layers, layout.dtype, layout.device)
        self._storage = self._room(0) if native else None

    def _hidden(self, texts: list[list[int]]) -> list[Tensor]:
        lengths = [len(text) for text in texts]
        wanted = self._pooling.wanted(lengths)
        hidden = self._runner.step(self._step(texts, lengths, wanted))
        return list(hidden.split(lengths if wanted is None else 1))

    def _step(self, texts: list[list[int]], lengths: list[int], wanted: list[int] | None) -> Step:
        ids = self._tensor([id for text in texts for id in text])
        positions = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        total = ids.numel()
        sources = self._sources(total)
        own, at = [], 0
        for length in lengths:
            tokens = slice(at, at + length)
            own.append(Part(tokens, sources, at, length, 0, positions[tokens], triangular=True))
            at += length
        keep = torch.arange(total, device=self._device) if wanted is None else self._tensor(wanted)
        writes = [Write(slice(0, total), sources)] if sources else []
        return Step(ids, positions, keep, writes, own, [])

    def _sources(self, tokens: int) -> list[kv.Storage]:
        """Return the one storage of all texts, grown to so many tokens; none where no keys are written."""
        if self._storage is None:
            return []
        if self._storage.capacity < tokens:
            self._storage = self._room(tokens)
        return [self._storage]

    def _room(self, tokens: int) -> kv.Storage:
        elements = tokens * self._layout.token_elements
        flat = torch.empty(elements, dtype=self._layout.dtype, device=self._device)
        return kv.Storage(kv.Memory(self._layout, 0), flat, 0, tokens)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


class _OneLayer(kv.Layout):
    """Keys and values of every layer in one place: none are needed after their own layer."""

    @property
    def token_elements(self) -> int:
        return max(heads * (key + value) for heads, key, value in self.layers)

    @functools.cached_property
    def offsets(self) -> NDArray[np.int64]:
        return np.array([(0, heads * key) for heads, key, _ in self.layers], dtype=np.int64)
