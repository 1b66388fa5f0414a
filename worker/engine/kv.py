"""Where keys and values live: written in place once, read in place by every step.

A prefix node has a buffer; a request's own tokens have a slot. Slots of one capacity lie side by side in a
pool, without holes, so that all requests of a pool attend in one batched product without a gather.
"""

import logging
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.engine import arena

log = logging.getLogger(__name__)

_SMALLEST = 32
_GROWTH = 1.5
_LEAST_BYTES = 64 << 20


@dataclass(frozen=True)
class Layout:
    """Per attention layer its (KV heads, key size, value size), which may differ between layers."""

    layers: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_elements(self) -> int:
        return sum(heads * (key + value) for heads, key, value in self.layers)

    @property
    def token_bytes(self) -> int:
        return self.token_elements * self.dtype.itemsize

    def views(self, flat: Tensor, slots: int, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values [slots, heads, tokens, size] of every layer, side by side in `flat`."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        at = 0
        for heads, *sizes in self.layers:
            for tensors, size in zip((keys, values), sizes, strict=True):
                count = slots * heads * tokens * size
                tensors.append(flat[at : at + count].view(slots, heads, tokens, size))
                at += count
        return keys, values


class Storage:
    """KV of some slots of some tokens: `keys[layer]`, `values[layer]` [slots, heads, tokens, size].

    `pointers` is for who reads it by address; made when first asked for.
    """

    def __init__(self, memory: "Memory", slots: int, tokens: int) -> None:
        self._memory = memory
        self._bytes = slots * tokens * memory.layout.token_bytes
        self._start, flat = memory.take(self._bytes)
        self.keys, self.values = memory.layout.views(flat, slots, tokens)
        self.pointers: Any = None

    def free(self) -> None:
        self._memory.give_back(self._start, self._bytes)
        self.keys, self.values, self.pointers = [], [], None

class Memory:
    """Counts the bytes of KV and says what still fits. Everything that holds KV is made here.

    With `zeroed` it starts as zeros: for who multiplies what lies behind a sequence by a weight of 0, which a
    NaN would survive.
    """

    def __init__(self, layout: Layout, budget: int, zeroed: bool = True) -> None:
        self.layout = layout
        self.budget = budget
        self.used = 0
        self._zeroed = zeroed
        self._pools: dict[int, Pool] = {}
        self._arena: arena.Arena | None = None

    def take(self, size: int) -> tuple[int | None, Tensor]:
        """Return where a block of bytes lies, and its elements; counted as used."""
        self.used += size
        layout = self.layout
        if layout.device.type != "cpu":  # torch keeps freed memory of such devices itself
            return None, torch.zeros(size // layout.dtype.itemsize, dtype=layout.dtype, device=layout.device)
        if self._arena is None:
            # Address space costs nothing, and what is free may lie in pieces.
            self._arena = arena.Arena(min(2 * self.budget + _LEAST_BYTES, _physical_bytes()))
        try:
            start, block, fresh = self._arena.take(size)
        except MemoryError as error:
            log.warning("memory for keys and values is in pieces: %s", error)
            return None, torch.zeros(size // layout.dtype.itemsize, dtype=layout.dtype)
        elements = block[:size].view(layout.dtype)
        return start, elements if fresh or not self._zeroed else elements.zero_()

    def give_back(self, start: int | None, size: int) -> None:
        self.used -= size
        if self._arena is not None and start is not None:
            self._arena.give_back(start, size)

    def fits(self, tokens: int) -> bool:
        """Tell whether so many more tokens fit."""
        return self.used + tokens * self.layout.token_bytes <= self.budget

    def buffer(self, tokens: int) -> "Buffer":
        return Buffer(self, tokens)

    def slot(self, tokens: int) -> "Slot":
        """Return a slot for at least so many tokens."""
        capacity = capacity_of(tokens)
        pool = self._pools.setdefault(capacity, Pool(self, capacity))
        return pool.take()

    def slot_cost(self, tokens: int, already: int = 0) -> int:
        """Return how many tokens a slot takes from the budget after `already` others: 0 where one is free."""
        capacity = capacity_of(tokens)
        pool = self._pools.get(capacity)
        free = pool.free - already if pool else -already
        return 0 if free > 0 else capacity


class Buffer(Storage):
    """KV of one run of tokens, in one slot."""

    def __init__(self, memory: Memory, tokens: int) -> None:
        super().__init__(memory, 1, tokens)
        self.tokens = tokens

    def split(self, at: int) -> tuple["Buffer", "Buffer"]:
        """Return copies of the KV before and from token `at`; views would keep the whole alive."""
        parts = Buffer(self._memory, at), Buffer(self._memory, self.tokens - at)
        for part, start in zip(parts, (0, at), strict=True):
            part.copy(self.keys, self.values, 0, start, part.tokens)
        self.free()
        return parts

    def copy(self, keys: list[Tensor], values: list[Tensor], row: int, start: int, tokens: int) -> None:
        """Take the first tokens from `start` on of a row of keys and values [slots, heads, tokens, size]."""
        for target, source in zip(self.keys + self.values, keys + values, strict=True):
            target[0, :, :tokens] = source[row, :, start : start + tokens]


class Slot:
    """Room for one request's own tokens: row `index` of its pool. `length` tokens are written."""

    __slots__ = ("index", "length", "pool")

    def __init__(self, pool: "Pool", index: int) -> None:
        self.pool = pool
        self.index = index
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.pool.capacity

    def free(self) -> None:
        self.pool.release(self)

    def copy(self, at: int, buffer: Buffer, tokens: int) -> None:
        """Take the first tokens of a buffer to position `at`."""
        pool = self.pool
        for target, source in zip(pool.keys + pool.values, buffer.keys + buffer.values, strict=True):
            target[self.index, :, at : at + tokens] = source[0, :, :tokens]
        self.length = max(self.length, at + tokens)

    def moved(self, tokens: int) -> "Slot":
        """Return a larger slot, for at least so many tokens, with the same content; this one is freed."""
        larger = self.pool.memory.slot(tokens)
        larger.pool.copy(larger.index, self.pool, self.index, self.length)
        larger.length = self.length
        self.free()
        return larger


class Pool:
    """Slots of one capacity, the used ones in front, in one storage."""

    def __init__(self, memory: Memory, capacity: int) -> None:
        self.memory = memory
        self.capacity = capacity
        self.slots: list[Slot] = []
        self._allocated = 0
        self._storage: Storage | None = None

    @property
    def keys(self) -> list[Tensor]:
        return self._storage.keys if self._storage else []

    @property
    def values(self) -> list[Tensor]:
        return self._storage.values if self._storage else []

    @property
    def storage(self) -> Storage:
        assert self._storage is not None
        return self._storage

    @property
    def free(self) -> int:
        return self._allocated - len(self.slots)

    def take(self) -> Slot:
        if not self.free:
            self._grow()
        slot = Slot(self, len(self.slots))
        self.slots.append(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Free a slot; the last one moves into the hole."""
        last = self.slots.pop()
        if last is not slot:
            self.copy(slot.index, self, last.index, last.length)
            last.index = slot.index
            self.slots[slot.index] = last
        if not self.slots:
            self._resize(0)

    def copy(self, index: int, pool: "Pool", other: int, tokens: int) -> None:
        for target, source in zip(self.keys + self.values, pool.keys + pool.values, strict=True):
            target[index, :, :tokens] = source[other, :, :tokens]

    def _grow(self) -> None:
        wanted = math.ceil(self._allocated * _GROWTH) - self._allocated
        while wanted > 1 and not self.memory.fits(wanted * self.capacity):
            wanted //= 2
        self._resize(self._allocated + max(1, wanted))

    def _resize(self, slots: int) -> None:
        old, self._storage = self._storage, Storage(self.memory, slots, self.capacity) if slots else None
        self._allocated = slots
        if old is None:
            return
        kept, length = len(self.slots), max((slot.length for slot in self.slots), default=0)
        if kept:
            for target, source in zip(self.keys + self.values, old.keys + old.values, strict=True):
                target[:kept, :, :length] = source[:kept, :, :length]
        old.free()


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def capacity_of(tokens: int) -> int:
    """Return the capacity class for so many tokens: 32, 48, 64, 96, 128, ... At most a third is padding."""
    power = max(_SMALLEST, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if power > _SMALLEST and tokens <= power * 3 // 4 else power
