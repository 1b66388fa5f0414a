"""KV in pages: fixed runs of positions, counted, shared by reference, copied when written to.

As in PagedAttention (Kwon et al. 2023). Page k of whatever a request's tokens pass through holds positions
k * page_tokens to (k + 1) * page_tokens, so one table from the first position on describes each request. What
begins inside a page has a page of its own there, and first copies into it what its parent has before.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import kv

if TYPE_CHECKING:
    from worker.engine.host_tier import HostTier

PAGE_TOKENS = 256
"""What flash-attn's paged kernels take: a multiple of this."""


class Pool:
    """Keys and values of all pages, layer by layer: `keys[layer]` [pages, page_tokens, KV heads, size].

    Page 0 is nobody's: padding is written there. `take(shape)` makes one tensor of them (None: zeros on the
    layout's device).
    """

    memory: Tensor | None = None
    """What all of them lie in and which must be held, if there is such."""

    def __init__(
        self,
        layout: kv.Layout,
        pages: int,
        page_tokens: int = PAGE_TOKENS,
        take: Callable[[tuple[int, ...]], Tensor] | None = None,
    ) -> None:
        self.layout = layout
        self.pages = pages
        self.page_tokens = page_tokens
        take = take or self._zeros
        self.keys = [take((pages, page_tokens, heads, key)) for heads, key, _ in layout.layers]
        self.values = [take((pages, page_tokens, heads, value)) for heads, _, value in layout.layers]

    @property
    def tensors(self) -> list[Tensor]:
        """All keys, then all values."""
        return [*self.keys, *self.values]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy tokens, by page * page_tokens + place, all at once: a source may be the target of another."""
        for layer in self.tensors:
            tokens = layer.flatten(0, 1)
            tokens.index_copy_(0, targets, tokens.index_select(0, sources))

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.layout.dtype, device=self.layout.device)


class Run:
    """A prefix node's KV: the pages of positions `start` to `start + tokens`. Holds a reference on each."""

    loose = False
    """See kv.Run: what pages hold besides goes with the pages."""

    def __init__(self, memory: "Counted", pages: list[int], start: int, tokens: int) -> None:
        self._memory = memory
        self.pages = pages
        self.start = start
        self.tokens = tokens

    @property
    def first_page(self) -> int:
        return self.pages[0]

    def split(self, at: int) -> tuple["Run", "Run"]:
        """Return the runs before and from token `at`, in place of this one; both hold the page in between."""
        middle, size = self.start + at, self._memory.page_tokens
        upper = self.pages[: -(-middle // size) - self.start // size]
        lower = self.pages[middle // size - self.start // size :]
        if middle % size:
            self._memory.retain(lower[:1])
        return Run(self._memory, upper, self.start, at), Run(self._memory, lower, middle, self.tokens - at)

    def release(self) -> None:
        self._memory.release(self.pages)


class Slot:
    """The pages of one request, those of its prefix too, which it only reads.

    `table` [n] are all its pages; its own begin at position `start`, and `length` tokens of them are written.
    """

    def __init__(self, memory: "Memory", prefix: list[int], start: int, own: list[int]) -> None:
        self._memory = memory
        self.start = start
        self.table = np.array([*prefix, *own], dtype=np.int32)
        self.length = 0

    @property
    def first_page(self) -> int:
        """The first one that is its own."""
        return int(self.table[self.start // self._memory.page_tokens])

    @property
    def capacity(self) -> int:
        return len(self.table) * self._memory.page_tokens - self.start

    def release(self) -> None:
        self._memory.release(self.table.tolist())

    def run(self, first: int, tokens: int) -> Run:
        """Return a run of its own tokens, for which the pages stay."""
        start, size = self.start + first, self._memory.page_tokens
        pages = self.table[start // size : -(-(start + tokens) // size)].tolist()
        return Run(self._memory, self._memory.retain(pages), start, tokens)

    def grown(self) -> "Slot":
        """Take one more page."""
        self.table = np.append(self.table, np.int32(self._memory.take(1)[0]))
        return self


class Counted:
    """Says which of some pages are free and how many hold on to each of the others."""

    def __init__(self, pages: Iterable[int], page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._free = list(pages)[::-1]
        self._holders: NDArray[np.int32] = np.zeros(max(self._free, default=0) + 1, dtype=np.int32)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return pages that nobody holds. Raises MemoryError."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages wanted, {len(self._free)} free")
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self._holders[pages] = 1
        return pages

    def retain(self, pages: list[int]) -> list[int]:
        """Count one more holder of each."""
        self._holders[pages] += 1
        return pages

    def release(self, pages: list[int]) -> None:
        """Count one holder less of each; pages without any are free."""
        self._holders[pages] -= 1
        self._free += [page for page in reversed(pages) if not self._holders[page]]


class Memory(Counted):
    """The pages of a pool. `host` is where KV goes that there is no room for.

    `copies` are pages of which the first tokens, so many, are to be copied before the next step, by target.
    No more than these: others may hold the target as well, and have the same there.
    """

    paged = True

    def __init__(self, layout: kv.Layout, budget: int, page_tokens: int = PAGE_TOKENS) -> None:
        self.layout = layout
        self.budget = budget
        self.page_bytes = page_tokens * layout.token_bytes
        self.pool = Pool(layout, budget // self.page_bytes + 1, page_tokens)
        super().__init__(range(1, self.pool.pages), page_tokens)
        self.host: HostTier | None = None
        self.copies: dict[int, tuple[int, int]] = {}

    @property
    def used(self) -> int:
        """How many bytes are held."""
        return (self.pool.pages - 1 - len(self._free)) * self.page_bytes

    def take(self, count: int) -> list[int]:
        """Return pages that nobody holds, and to which nothing is to be copied. Raises MemoryError."""
        taken = super().take(count)
        for page in taken:
            self.copies.pop(page, None)
        return taken

    @property
    def streams(self) -> bool:
        """Whether steps can read what is in host memory."""
        return self.host is not None and self.host.streams

    def fits(self, tokens: int) -> bool:
        """Tell whether so many more tokens fit, a multiple of `page_tokens`."""
        return tokens <= len(self._free) * self.page_tokens

    def run_tokens(self, start: int, tokens: int) -> int:
        """Return what a run takes, in tokens."""
        return (-(-(start + tokens) // self.page_tokens) - start // self.page_tokens) * self.page_tokens

    def slot_tokens(self, tokens: int) -> int:
        """Return what a slot for so many own tokens takes."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    def growth_tokens(self, slot: Slot) -> int:
        """Return what one more token takes in a slot that is full."""
        return self.page_tokens

    def slot_start(self, own_first: int) -> int:
        """Return the position from which on a sequence has pages to itself, if its own tokens begin there."""
        return own_first // self.page_tokens * self.page_tokens

    def run(self, start: int, tokens: int, before: Run | None = None) -> Run:
        """Return a run on pages of its own; it begins on the last one of `before`, after which it comes, if
        that does not end with it.
        """
        first = self.retain(before.pages[-1:]) if before is not None and start % self.page_tokens else []
        count = self.run_tokens(start, tokens) // self.page_tokens - len(first)
        return Run(self, first + self.take(count), start, tokens)

    def slot(self, start: int, tokens: int, prefix: Sequence[Run]) -> Slot:
        """Return a slot for at least so many own tokens from `start` on, behind the runs of a path."""
        shared = self.retain(table_of(prefix, self.page_tokens)[: start // self.page_tokens])
        return Slot(self, shared, start, self.take(self.slot_tokens(tokens) // self.page_tokens))

    def beginning(self, own: Run | Slot, parent: Run) -> dict[int, tuple[int, int]] | None:
        """Return what must be copied before the first token of `own` is computed: the beginning of the page
        of its parent which it begins in. None: it begins a page, or has the parent's.
        """
        middle = (parent.start + parent.tokens) % self.page_tokens
        source, target = parent.pages[-1], own.first_page
        return {target: (source, middle)} if middle and target != source else None


def table_of(runs: Sequence[Run], page_tokens: int) -> list[int]:
    """Return the pages of runs that follow each other from position 0 on: each has what the former ones have
    before it in its first page.
    """
    table: list[int] = []
    for run in runs:
        table[run.start // page_tokens :] = run.pages
    return table
