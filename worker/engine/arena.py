"""Blocks of one range of memory for keys and values, used again as soon as they are free."""

import bisect
import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_ALIGNMENT = 64
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_TOUCHED_AT_ONCE = 32 << 20
_LEFT_FREE = 2 << 30
_IDLE_SECONDS = 0.1


class Arena:
    """Says where blocks lie in `size` bytes: as low as they can, so that the same memory is used again."""

    def __init__(self, size: int) -> None:
        self._starts, self._sizes = [0], [size]  # of the free blocks, by address
        self._touched = 0

    def take(self, size: int) -> tuple[int, bool]:
        """Return where a block starts, and whether no block was there before. Raises MemoryError."""
        size = rounded(size)
        i = next((i for i, free in enumerate(self._sizes) if free >= size), None)
        if i is None:
            raise MemoryError(f"no {size} bytes in one piece")
        start = self._starts[i]
        if self._sizes[i] == size:
            del self._starts[i], self._sizes[i]
        else:
            self._starts[i] += size
            self._sizes[i] -= size
        fresh = start >= self._touched
        self._touched = max(self._touched, start + size)
        return start, fresh

    def give_back(self, start: int, size: int) -> None:
        """Free a block; it is joined with free neighbours."""
        size = rounded(size)
        i = bisect.bisect(self._starts, start)
        if i < len(self._starts) and start + size == self._starts[i]:
            size += self._sizes[i]
            del self._starts[i], self._sizes[i]
        if i and self._starts[i - 1] + self._sizes[i - 1] == start:
            self._sizes[i - 1] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)


def pages(size: int) -> Tensor:
    """Return at least so many zero bytes of a CPU's address space.

    Touching fresh memory costs more than the keys and values written to it: the system clears each page. So
    pages are huge where the system has such. Physical memory is taken by what is touched, not by `size`.
    """
    # Not reserved: a machine may have less memory than the address space that is asked for.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    found = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            found.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(found, dtype=torch.uint8)


def touch(flat: Tensor, size: int, idle: Callable[[], bool], stopped: threading.Event) -> None:
    """Let the system back the first bytes of `pages` with memory while nothing else is to be done.

    Returns when it has, when `stopped`, when memory gets scarce, or where a kernel cannot do so ahead of use.
    """
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start in range(0, min(size, flat.nbytes), _TOUCHED_AT_ONCE):
        while not idle():
            if stopped.wait(_IDLE_SECONDS):
                return
        if stopped.is_set() or os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE < _LEFT_FREE:
            return
        length = min(_TOUCHED_AT_ONCE, flat.nbytes - start)
        if madvise(flat.data_ptr() + start, length, _MADV_POPULATE_WRITE):
            log.debug("memory cannot be populated: %s", os.strerror(ctypes.get_errno()))
            return


def rounded(size: int) -> int:
    """Return what a block of so many bytes takes."""
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT
