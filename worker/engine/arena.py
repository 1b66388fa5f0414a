"""Memory for keys and values on a CPU: one range of address space, used again as soon as it is free."""

import bisect
import mmap

import torch
from torch import Tensor

_ALIGNMENT = 64


class Arena:
    """Hands out blocks of at most `size` bytes in all.

    Touching fresh memory costs more than the keys and values written to it: the system clears each page. So
    pages are huge where the system has such, and freed blocks are reused, the lowest address first.
    Physical memory is taken by what has been touched, not by `size`.
    """

    def __init__(self, size: int) -> None:
        size = size // mmap.PAGESIZE * mmap.PAGESIZE
        # Not reserved: a machine may have less memory than the address space that is asked for.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        pages = mmap.mmap(-1, size, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without huge pages
                pass
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self._starts, self._sizes = [0], [size]  # of the free blocks, by address
        self._touched = 0

    def take(self, size: int) -> tuple[int, Tensor, bool]:
        """Return where a block lies, its bytes [size], and whether these are all zero. Raises MemoryError."""
        size = _rounded(size)
        for i, free in enumerate(self._sizes):
            if free >= size:
                break
        else:
            raise MemoryError(f"no {size} bytes in one piece")
        start = self._starts[i]
        if free == size:
            del self._starts[i], self._sizes[i]
        else:
            self._starts[i] += size
            self._sizes[i] -= size
        fresh = start >= self._touched
        self._touched = max(self._touched, start + size)
        return start, self._bytes[start : start + size], fresh

    def give_back(self, start: int, size: int) -> None:
        """Free a block; it is joined with free neighbours."""
        size = _rounded(size)
        i = bisect.bisect(self._starts, start)
        if i < len(self._starts) and start + size == self._starts[i]:
            size += self._sizes[i]
            del self._starts[i], self._sizes[i]
        if i and self._starts[i - 1] + self._sizes[i - 1] == start:
            self._sizes[i - 1] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)


def _rounded(size: int) -> int:
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT
