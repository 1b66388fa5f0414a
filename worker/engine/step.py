"""What one step of the model computes: a packed run of tokens, where their KV goes, and which keys
each sees.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tokens = slice | Tensor
"""Which of the packed tokens: a range, or their indices [n]."""


@dataclass(eq=False)
class Part:
    """Queries and one run of keys that they see; a query of several parts sees all their keys.

    `source` has `keys[layer]`, `values[layer]` [rows, heads, tokens, size], of which `rows` and the first
    `length` tokens from `first` on are meant. Key j lies at position `start` + j; a query sees it when it
    lies no later than itself. In a batched part query i has row i to itself (`start` [n]); else all queries
    share one row. `all_seen`: no query lies before any of the keys. `triangular`: query i is at key i.
    `last`: no part after it has queries of it.
    """

    tokens: Tokens
    source: Any
    rows: slice
    first: int
    length: int
    start: int | Tensor
    positions: Tensor  # [n] of the queries
    batched: bool = False
    all_seen: bool = False
    triangular: bool = False
    last: bool = False
    _masks: dict[tuple[int | None, torch.dtype], Tensor | None] = field(default_factory=dict)
    _reach: int | None = None

    @property
    def reach(self) -> int:
        """How far back the farthest-reaching query looks, itself included."""
        if self._reach is None:
            self._reach = int((self.positions - self.start).max()) + 1
        return self._reach

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, heads, length, size] of a layer; B is 1 unless batched."""
        keys, values = self.source.keys[layer], self.source.values[layer]
        if self.length == keys.shape[2] and keys.shape[0] == 1:
            return keys, values
        end = self.first + self.length
        return keys[self.rows, :, self.first : end], values[self.rows, :, self.first : end]

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
    """Where the KV of packed tokens goes: token i of `tokens` to row `rows[i]`, position `at[i]` of the
    source.

    With `rows` None they go to consecutive positions from `first` on of row `row`.
    """

    tokens: slice
    source: Any
    row: int = 0
    first: int = 0
    rows: Tensor | None = None
    at: Tensor | None = None

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, heads, size] of all packed tokens of a layer."""
        for target, new in (
            (self.source.keys[layer], keys[self.tokens]),
            (self.source.values[layer], values[self.tokens]),
        ):
            if self.rows is None:
                end = self.first + new.shape[0]
                target[self.row, :, self.first : end] = new.transpose(0, 1)
            else:
                target.transpose(1, 2).index_put_((self.rows, self.at), new)


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
