"""Host memory for the KV that a device has no room for: moved out, and back when a request needs it.

A move is launched when it is decided, in the order of everything else on the device's stream. So a page is
read before whoever has it next writes to it, on either side, and written before whoever needs it reads it:
the host waits for nothing.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from worker.engine import device, pages

Mover = Callable[[bool, list[int], list[int]], None]
"""Moves pages (out of the pool, or into it): those of the pool, and those of host memory, as many."""
MOST_PAGES = 24
"""In one move: a layer's pages are put side by side on the device, and a team is told of all of them."""


class HostTier(pages.Counted):
    """Pages of host memory: how many hold on to each, and what moves them.

    `evictions` counts prefixes that made room for others.
    """

    def __init__(self, memory: pages.Memory, size: int, here: device.Device) -> None:
        self.pages = size // memory.page_bytes
        super().__init__(range(self.pages), memory.page_tokens)
        self.page_bytes = memory.page_bytes
        self.mover = mover(memory.pool, self.pages, here)
        self.evictions = 0

    @property
    def used(self) -> int:
        """How many bytes are held."""
        return (self.pages - self.free_pages) * self.page_bytes

    def pages_for(self, start: int, tokens: int) -> int:
        """Return how many pages a run takes."""
        return -(-(start + tokens) // self.page_tokens) - start // self.page_tokens

    def store(self, run: pages.Run, tokens: int) -> pages.Run:
        """Return a copy of the first tokens of a run."""
        kept = self.take(self.pages_for(run.start, tokens))
        self._move(True, run.pages[: len(kept)], kept)
        return pages.Run(self, kept, run.start, tokens)

    def restore(self, kept: pages.Run, run: pages.Run, tokens: int) -> None:
        """Copy the first tokens that are kept to a run which begins where they do."""
        count = self.pages_for(run.start, tokens) if tokens else 0
        self._move(False, run.pages[:count], kept.pages[:count])

    def _move(self, out: bool, device_pages: list[int], host_pages: list[int]) -> None:
        for first in range(0, len(host_pages), MOST_PAGES):
            last = first + MOST_PAGES
            self.mover(out, device_pages[first:last], host_pages[first:last])


def mover(pool: pages.Pool, count: int, here: device.Device) -> Mover:
    """Return what moves pages between a pool and so many pages of host memory, which it takes."""
    host = host_pool(pool, count, here)

    def move(out: bool, device_pages: list[int], host_pages: list[int]) -> None:
        at = here.stage(np.array(device_pages, dtype=np.int64))
        for layer, kept in zip(pool.tensors, host.tensors, strict=True):
            (_move_out if out else _move_in)(layer, at, kept, host_pages)

    return move


def host_pool(pool: pages.Pool, count: int, here: device.Device) -> pages.Pool:
    """Return as many pages of host memory, laid out as those of a pool."""
    layout = pool.layout
    flat = here.pinned(count * pool.page_tokens * layout.token_bytes).view(layout.dtype)
    taken = 0

    def take(shape: tuple[int, ...]) -> Tensor:
        nonlocal taken
        first, taken = taken, taken + int(np.prod(shape))
        return flat[first:taken].view(shape)

    return pages.Pool(layout, count, pool.page_tokens, take)


def _move_out(layer: Tensor, at: Tensor, kept: Tensor, host_pages: list[int]) -> None:
    gathered = layer.index_select(0, at)
    for first, last, start in _runs(host_pages):
        kept[start : start + last - first].copy_(gathered[first:last], non_blocking=True)


def _move_in(layer: Tensor, at: Tensor, kept: Tensor, host_pages: list[int]) -> None:
    arrived = torch.empty((len(host_pages), *layer.shape[1:]), dtype=layer.dtype, device=layer.device)
    for first, last, start in _runs(host_pages):
        arrived[first:last].copy_(kept[start : start + last - first], non_blocking=True)
    layer.index_copy_(0, at, arrived)


def _runs(host_pages: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, page) of what follows each other: a copy for each, not for each page."""
    first = 0
    for last in range(1, len(host_pages) + 1):
        if last == len(host_pages) or host_pages[last] != host_pages[last - 1] + 1:
            yield first, last, host_pages[first]
            first = last
