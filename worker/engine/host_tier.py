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

    `evictions` counts prefixes that made room for others. `windows` are those of the model's layers. A step
    can read what is here if it `streams`: not in a team, whose other ranks know no more than its tensors.
    """

    def __init__(self, memory: pages.Memory, size: int, here: device.Device) -> None:
        self.pages = size // memory.page_bytes
        super().__init__(range(self.pages), memory.page_tokens)
        self.page_bytes = memory.page_bytes
        self.pool = host_pool(memory.pool, self.pages, here)
        self.mover = mover(memory.pool, self.pool, here)
        self.evictions = 0
        self.streams = True
        self.windows: list[int] = []
        self._device_pool = memory.pool
        self._here = here

    @property
    def used(self) -> int:
        """How many bytes are held."""
        return (self.pages - self.free_pages) * self.page_bytes

    def pages_for(self, start: int, tokens: int) -> int:
        """Return how many pages a run takes."""
        return -(-(start + tokens) // self.page_tokens) - start // self.page_tokens

    def store(self, run: pages.Run, tokens: int) -> pages.Run:
        """Return a copy of the first tokens of a run."""
        kept = self.store_pages(run.pages[: self.pages_for(run.start, tokens)])
        return pages.Run(self, kept, run.start, tokens)

    def store_pages(self, device_pages: list[int]) -> list[int]:
        """Return copies of pages."""
        kept = self.take(len(device_pages))
        self._move(True, device_pages, kept)
        return kept

    def restore(self, kept: pages.Run, run: pages.Run, tokens: int) -> None:
        """Copy the first tokens that are kept to a run which begins where they do."""
        count = self.pages_for(run.start, tokens) if tokens else 0
        self._move(False, run.pages[:count], kept.pages[:count])

    def bring(self, layer: int, host_pages: list[int], device_pages: list[int]) -> Callable[[], None]:
        """Begin to copy a layer's keys and values, beside what is launched next; return what makes everything
        that is launched after it wait for them.
        """

        def copy() -> None:
            for kept, target in (
                (self.pool.keys[layer], self._device_pool.keys[layer]),
                (self.pool.values[layer], self._device_pool.values[layer]),
            ):
                for source, page, count in _common_runs(host_pages, device_pages):
                    target[page : page + count].copy_(kept[source : source + count], non_blocking=True)

        return self._here.beside(copy)

    def _move(self, out: bool, device_pages: list[int], host_pages: list[int]) -> None:
        for first in range(0, len(host_pages), MOST_PAGES):
            last = first + MOST_PAGES
            self.mover(out, device_pages[first:last], host_pages[first:last])


def mover(pool: pages.Pool, host: pages.Pool, here: device.Device) -> Mover:
    """Return what moves pages between two pools, of a device and of host memory."""

    # Taken once: a move is planned between steps, where nothing backs off when memory is short.
    shapes = {layer.shape[1:]: layer for layer in pool.tensors}
    between = {shape: layer.new_empty((MOST_PAGES, *shape)) for shape, layer in shapes.items()}

    def move(out: bool, device_pages: list[int], host_pages: list[int]) -> None:
        at = here.stage(np.array(device_pages, dtype=np.int64))
        for layer, kept in zip(pool.tensors, host.tensors, strict=True):
            scratch = between[layer.shape[1:]][: len(host_pages)]
            (_move_out if out else _move_in)(layer, at, kept, host_pages, scratch)

    return move


def host_pool(pool: pages.Pool, count: int, here: device.Device) -> pages.Pool:
    """Return as many pages of host memory, laid out as those of a pool."""
    layout = pool.layout
    memory = here.pinned(count * pool.page_tokens * layout.token_bytes)
    flat = memory.view(layout.dtype)
    taken = 0

    def take(shape: tuple[int, ...]) -> Tensor:
        nonlocal taken
        first, taken = taken, taken + int(np.prod(shape))
        return flat[first:taken].view(shape)

    made = pages.Pool(layout, count, pool.page_tokens, take)
    made.memory = memory
    return made


def _move_out(layer: Tensor, at: Tensor, kept: Tensor, host_pages: list[int], scratch: Tensor) -> None:
    torch.index_select(layer, 0, at, out=scratch)
    for first, last, start in _runs(host_pages):
        kept[start : start + last - first].copy_(scratch[first:last], non_blocking=True)


def _move_in(layer: Tensor, at: Tensor, kept: Tensor, host_pages: list[int], scratch: Tensor) -> None:
    for first, last, start in _runs(host_pages):
        scratch[first:last].copy_(kept[start : start + last - first], non_blocking=True)
    layer.index_copy_(0, at, scratch)


def _runs(host_pages: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, last, page) of what follows each other: a copy for each, not for each page."""
    first = 0
    for last in range(1, len(host_pages) + 1):
        if last == len(host_pages) or host_pages[last] != host_pages[last - 1] + 1:
            yield first, last, host_pages[first]
            first = last


def _common_runs(host_pages: list[int], device_pages: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (host page, device page, how many) of what follows each other on both sides."""
    for first, last, source in _runs(host_pages):
        for begin, end, page in _runs(device_pages[first:last]):
            yield source + begin, page, end - begin
