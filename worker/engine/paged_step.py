"""What one step computes when KV lies in pages: queries in rows, and on which pages the keys of a row lie."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from worker.engine.pages import Pool


@dataclass(frozen=True, eq=False)
class Rows:
    """n rows of queries, one after the other, each with a run of keys on pages of its own table.

    Row i has the queries `starts[i]` to `starts[i + 1]` and the first `lengths[i]` keys of its pages
    `tables[i]`, in order. A table is filled up with page 0. `most_queries` and `most_keys` are upper bounds
    of a row's.
    """

    starts: Tensor  # [n + 1] int32
    ends: Tensor  # [n + 1] int32: keys of all rows before, as `starts` for queries
    lengths: Tensor  # [n] int32
    tables: Tensor  # [n, W] int32
    most_queries: int
    most_keys: int


@dataclass(frozen=True, eq=False)
class Shared:
    """Keys that several tokens see: `rows` of copies of their queries, each seeing all keys of its row.

    Query i of the rows is that of the packed token `queries[i]`. `places[t]` are where among the queries the
    copies of token t are, at most L; -1 fills up.
    """

    rows: Rows
    queries: Tensor  # [N] int64
    places: Tensor  # [T, L] int64


@dataclass(eq=False)
class Own:
    """The keys each token has to itself. First `decodes` tokens with one query a row, then prefill: there a
    row is a run of tokens at the end of its keys, and each sees the keys up to itself (bottom-right).
    """

    decodes: int
    decode: Rows | None
    prefill: Rows | None


@dataclass(frozen=True, eq=False)
class Piece:
    """Keys that are brought to pages of the pool when they are attended to: `rows` has one row, of all the
    tokens that see them, each of which sees all. `bring(layer)` begins to, and returns what waits for it.
    """

    rows: Rows
    bring: Callable[[int], Callable[[], None]]


@dataclass(frozen=True, eq=False)
class Streamed:
    """`keys` keys in host memory, before all others of the tokens `first` to `last`, which no others see.
    Every other piece has the same pages of the pool.
    """

    first: int
    last: int
    keys: int
    pieces: list[Piece]


@dataclass(eq=False)
class PagedStep:
    """One packed forward: `ids` and `positions` [T] int64; `wanted` [R] int64 are the tokens whose logits are
    needed. The KV of token t goes to page `slots[t] // page_tokens`, at `slots[t] % page_tokens` in it.

    `whole` are each token's keys from the first position on; `own` those that are not in `shared`, with which
    it makes the same. Without `shared` they are one object. Layers with a window take `whole`.
    """

    pool: Pool
    ids: Tensor
    positions: Tensor
    wanted: Tensor
    slots: Tensor  # [T] int64
    whole: Own
    own: Own
    shared: Shared | None
    copies: tuple[Tensor, Tensor] | None = None
    """Tokens [n] int64 to copy before all else, and to where [n], as in `slots`."""
    streamed: Streamed | None = None
    """Keys besides `whole`, and besides what makes the same; no layer with a window needs them."""
    attention_calls: int = 0
