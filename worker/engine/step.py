"""What one step of the model computes: a packed run of tokens, where their KV goes, and which keys
each sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.engine import kv

Tokens = slice | Tensor
"""Which of the packed tokens: a range, or their indices [n]."""


@dataclass(eq=False)
class Part:
    """Queries and one run of keys that they see; a query of several parts sees all their keys.

    The keys are `length` tokens of a source, from `first` on; key j lies at position `start` + j, and a query
    sees it when it lies no later than itself. All queries share one source, except in a batched part: there
    query i has source i to itself, and in it the first `lengths[i]` tokens (`start` [n]; `length` is the
    largest). `all_seen`: no query lies before any of the keys. `triangular`: query i is at key i.
    `last`: no part after it has queries of it.
    """

    tokens: Tokens
    sources: Sequence[kv.Storage]
    first: int
    length: int
    start: int | Tensor
    positions: Tensor  # [n] of the queries
    lengths: Sequence[int] = ()
    all_seen: bool = False
    triangular: bool = False
    last: bool = False
    _masks: dict[tuple[int | None, torch.dtype], Tensor | None] = field(default_factory=dict)
    _reach: int | None = None
    _pieces: "list[Part] | None" = None

    @property
    def batched(self) -> bool:
        return bool(self.lengths)

    @property
    def reach(self) -> int:
        """How far back the farthest-reaching query looks, itself included."""
        if self._reach is None:
            self._reach = self.length if self.batched else int((self.positions - self.start).max()) + 1
        return self._reach

    def pieces(self) -> "list[Part]":
        """Return this part as parts whose sources are one stack each. Kept for all layers."""
        if self._pieces is None:
            self._pieces = [self._piece(s) for s in kv.stacks(self.sources)] if self.batched else [self]
        return self._pieces

    def _piece(self, stack: slice) -> "Part":
        assert isinstance(self.tokens, slice)
        assert isinstance(self.start, Tensor)
        lengths = self.lengths[stack]
        return Part(
            slice(self.tokens.start + stack.start, self.tokens.start + stack.stop),
            self.sources[stack],
            self.first,
            max(lengths),
            self.start[stack],
            self.positions[stack],
            lengths,
            all_seen=min(lengths) == max(lengths),
            last=self.last,
        )

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, heads, length, size] of a layer of a piece; B is 1 unless batched."""
        keys, values = kv.stacked(self.sources, layer)
        end = self.first + self.length
        return keys[:, :, self.first : end], values[:, :, self.first : end]

    def visible(self, window: int | None) -> Tensor | None:
        """Return which keys each query sees, [n, length]; None: all."""
        last = self.positions - self.start  # [n]: the key at the query's own position
        keys = torch.arange(self.length, device=last.device)
        seen = keys <= last[:, None]
        if window is not None:
            seen &= keys > last[:, None] - window
        return None if bool(seen.all()) else seen

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return 0 where a query sees a key and -inf elsewhere, [n, length]; None: it sees all. Kept for all
        layers.
        """
        if self.all_seen and window is None:
            return None
        if (window, dtype) not in self._masks:
            seen = self.visible(window)
            mask = None
            if seen is not None:
                mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                    ~seen, -torch.inf
                )
            self._masks[window, dtype] = mask
        return self._masks[window, dtype]


@dataclass(eq=False)
class Write:
    """Where the KV of packed tokens goes: to consecutive positions of a source from `first` on; or, with `at`
    [n], that of token i to position `at[i]` of source i.
    """

    tokens: slice
    sources: Sequence[kv.Storage]
    first: int = 0
    at: Tensor | None = None
    _stacks: list[tuple[slice, Tensor]] | None = None

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, heads, size] of all packed tokens of a layer."""
        both = keys[self.tokens], values[self.tokens]
        if self.at is None:
            end = self.first + both[0].shape[0]
            for target, new in zip(kv.stacked(self.sources, layer), both, strict=True):
                target[0, :, self.first : end] = new.transpose(0, 1)
            return
        for stack, rows in self._rows(self.at.device):
            for target, new in zip(kv.stacked(self.sources[stack], layer), both, strict=True):
                target.transpose(1, 2).index_put_((rows, self.at[stack]), new[stack])

    def _rows(self, device: torch.device) -> list[tuple[slice, Tensor]]:
        """Return each stack and the numbers of its sources in it. Kept for all layers."""
        if self._stacks is None:
            self._stacks = [
                (stack, torch.arange(stack.stop - stack.start, device=device))
                for stack in kv.stacks(self.sources)
            ]
        return self._stacks


@dataclass(eq=False)
class Step:
    """One packed forward: `ids` and `positions` [T]; `wanted` [R] are the tokens whose logits are needed.

    The `own` parts together cover every token exactly once, with keys up to itself; the `shared` ones come on
    top.
    """

    ids: Tensor
    positions: Tensor
    wanted: Tensor
    writes: list[Write]
    own: list[Part]
    shared: list[Part]
    attention_calls: int = 0
