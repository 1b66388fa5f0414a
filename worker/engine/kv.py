"""Where keys and values live: written in place once, read in place by every step.

A storage is a block of one arena. A running request has one to itself, its slot; a prefix node has a run of
tokens in one, which may be what a request that has ended leaves behind: then nothing is copied.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import arena

log = logging.getLogger(__name__)

_SMALLEST = 32
_LEAST_BYTES = 64 << 20


@dataclass(frozen=True)
class Layout:
    """Per attention layer its (KV heads, key size, value size), which may differ between layers.

    A storage of n tokens holds, layer by layer, keys [heads, n, size], then values [heads, n, size].
    """

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_elements(self) -> int:
        return sum(heads * (key + value) for heads, key, value in self.layers)

    @functools.cached_property
    def token_bytes(self) -> int:
        return self.token_elements * self.dtype.itemsize

    @functools.cached_property
    def offsets(self) -> NDArray[np.int64]:
        """How many elements lie before keys and values [layers, 2] of a layer in a storage of one token; n
        times as many in one of n.
        """
        counts = np.array([(heads * key, heads * value) for heads, key, value in self.layers], dtype=np.int64)
        return (counts.cumsum() - counts.ravel()).reshape(counts.shape)

    @functools.cached_property
    def planes(self) -> list[tuple[int, int, int]]:
        """What lies side by side with one size: (elements before it, heads, size), as `offsets` counts."""
        planes: list[tuple[int, int, int]] = []
        at = 0
        for heads, *sizes in self.layers:
            for size in sizes:
                if planes and planes[-1][2] == size:
                    planes[-1] = (planes[-1][0], planes[-1][1] + heads, size)
                else:
                    planes.append((at, heads, size))
                at += heads * size
        return planes


class Storage:
    """KV of up to `capacity` tokens, from element `start` of `flat` on; given back with its last reference.

    `row` is (address, capacity), for who reads it by address.
    """

    __slots__ = ("_memory", "_references", "capacity", "flat", "layout", "row", "start")

    def __init__(self, memory: "Memory", flat: Tensor, start: int, capacity: int) -> None:
        self._memory = memory
        self._references = 1
        self.layout = memory.layout
        self.flat = flat
        self.start = start
        self.capacity = capacity
        self.row = (flat.data_ptr() + start * flat.itemsize, capacity)

    def retain(self) -> "Storage":
        """Count one more reference."""
        assert self._references
        self._references += 1
        return self

    def release(self) -> None:
        assert self._references
        self._references -= 1
        if not self._references:
            self._memory.give_back(self)

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, heads, capacity, size] of a layer."""
        return stacked([self], layer)

    def copy(self, at: int, source: "Storage", first: int, tokens: int) -> None:
        """Take so many tokens of another storage, from `first` on, to position `at`."""
        for plane in self.layout.planes:
            self._plane(*plane, at, tokens).copy_(source._plane(*plane, first, tokens))

    def _plane(self, offset: int, heads: int, size: int, first: int, tokens: int) -> Tensor:
        at = self.start + offset * self.capacity + first * size
        return self.flat.as_strided((heads, tokens, size), (self.capacity * size, size, 1), at)


@dataclass(frozen=True)
class Run:
    """A prefix node's KV: so many tokens of a storage, from `first` on. Holds a reference."""

    storage: Storage
    first: int
    tokens: int

    @property
    def loose(self) -> bool:
        """Whether its storage holds more than it."""
        return self.tokens < self.storage.capacity

    def split(self, at: int) -> tuple["Run", "Run"]:
        """Return the runs before and from token `at`, in place of this one."""
        return Run(self.storage, self.first, at), Run(
            self.storage.retain(), self.first + at, self.tokens - at
        )

    def release(self) -> None:
        self.storage.release()


class Slot:
    """A storage of one request's own tokens; `length` of them are written."""

    __slots__ = ("_memory", "length", "storage")

    def __init__(self, memory: "Memory", tokens: int) -> None:
        self._memory = memory
        self.storage = memory.storage(capacity_of(tokens))
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.storage.capacity

    def release(self) -> None:
        self.storage.release()

    def run(self, first: int, tokens: int) -> Run:
        """Return a run of its tokens, for which the storage stays."""
        return Run(self.storage.retain(), first, tokens)

    def copy(self, at: int, run: Run, tokens: int) -> None:
        """Take the first tokens of a run to position `at`."""
        self.storage.copy(at, run.storage, run.first, tokens)
        self.length = max(self.length, at + tokens)

    def grown(self) -> "Slot":
        """Return a slot for one token more at least, see `moved`."""
        return self.moved(self.capacity + 1)

    def moved(self, tokens: int) -> "Slot":
        """Return a larger slot, for at least so many tokens, with the same content; this one is released."""
        larger = Slot(self._memory, tokens)
        larger.storage.copy(0, self.storage, 0, self.length)
        larger.length = self.length
        self.release()
        return larger


class Memory:
    """Counts the bytes of KV and says what still fits. Everything that holds KV is made here.

    With `zeroed` it starts as zeros: for who multiplies what lies behind a sequence by a weight of 0, which a
    NaN would survive.
    """

    paged = False

    def __init__(self, layout: Layout, budget: int, zeroed: bool = True) -> None:
        self.layout = layout
        self.budget = budget
        self.used = 0
        self._zeroed = zeroed

    def touch_while(self, idle: Callable[[], bool]) -> Callable[[], None]:
        """Take the memory of the budget from the system ahead of its use, while `idle`; return what stops it.

        The first use of a page costs several times as much as writing keys and values to it.
        """
        stopped = threading.Event()
        if self.layout.device.type == "cpu":
            task = (self._flat, self.budget, idle, stopped)
            threading.Thread(target=arena.touch, args=task, name="touch", daemon=True).start()
        return stopped.set

    def fits(self, tokens: int) -> bool:
        """Tell whether so many more tokens fit."""
        return self.used + tokens * self.layout.token_bytes <= self.budget

    def storage(self, capacity: int) -> Storage:
        size = capacity * self.layout.token_bytes
        self.used += size
        try:
            start, fresh = self._arena.take(size)
        except MemoryError as error:
            log.warning("memory for keys and values is in pieces: %s", error)
            return Storage(self, self._elements(self._zeros(size)), 0, capacity)
        start, elements = start // self.layout.dtype.itemsize, capacity * self.layout.token_elements
        if self._zeroed and not fresh:
            self._flat[start : start + elements] = 0
        return Storage(self, self._flat, start, capacity)

    def give_back(self, storage: Storage) -> None:
        size = storage.capacity * self.layout.token_bytes
        self.used -= size
        if storage.flat is self._flat:
            self._arena.give_back(storage.start * self.layout.dtype.itemsize, size)

    def run_tokens(self, start: int, tokens: int) -> int:
        """Return what a run from position `start` on takes, in tokens."""
        return tokens

    def slot_tokens(self, tokens: int) -> int:
        """Return what a slot for so many tokens takes."""
        return capacity_of(tokens)

    def growth_tokens(self, slot: Slot) -> int:
        """Return what one more token takes in a slot that is full: the old one stays until it is copied."""
        return capacity_of(slot.capacity + 1)

    def slot(self, tokens: int) -> Slot:
        """Return a slot for at least so many tokens."""
        return Slot(self, tokens)

    def run(self, start: int, tokens: int) -> Run:
        """Return a run in a storage of its own, of the tokens from position `start` on."""
        return Run(self.storage(tokens), 0, tokens)

    @functools.cached_property
    def _flat(self) -> Tensor:
        """All there is, taken when the first storage is; zero."""
        if self.layout.device.type != "cpu":
            return self._elements(self._zeros(arena.rounded(self.budget)))
        # Address space costs nothing, and what is free may lie in pieces.
        return self._elements(arena.pages(min(2 * self.budget + _LEAST_BYTES, _physical_bytes())))

    @functools.cached_property
    def _arena(self) -> arena.Arena:
        return arena.Arena(self._flat.nbytes)

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.layout.device)

    def _elements(self, flat: Tensor) -> Tensor:
        return flat.view(self.layout.dtype)


def stacks(storages: Sequence[Storage]) -> list[slice]:
    """Return which neighbours make one stack: of one capacity, equally far from one another."""
    found: list[slice] = []
    first = 0
    for i in range(1, len(storages) + 1):
        if i == len(storages) or not _adjoins(storages, first, i):
            found.append(slice(first, i))
            first = i
    return found


def _adjoins(storages: Sequence[Storage], first: int, i: int) -> bool:
    last, this = storages[i - 1], storages[i]
    alike = this.capacity == last.capacity and this.flat is last.flat and this.start > last.start
    return alike and (i - 1 == first or this.start - last.start == last.start - storages[i - 2].start)


def stacked(stack: Sequence[Storage], layer: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [n, heads, capacity, size] of a layer of a stack, as views."""
    first = stack[0]
    apart = stack[1].start - first.start if len(stack) > 1 else 0
    heads, *sizes = first.layout.layers[layer]
    keys, values = (
        first.flat.as_strided(
            (len(stack), heads, first.capacity, size),
            (apart, first.capacity * size, size, 1),
            first.start + offset * first.capacity,
        )
        for size, offset in zip(sizes, first.layout.offsets[layer].tolist(), strict=True)
    )
    return keys, values


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def capacity_of(tokens: int) -> int:
    """Return the capacity class for so many tokens: 32, 48, 64, 96, 128, ... At most a third is padding."""
    power = max(_SMALLEST, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if power > _SMALLEST and tokens <= power * 3 // 4 else power
