"""Host memory that copies to a device start from: taken again only when the copy from it is done."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_LEAST_BYTES = 4096


class Buffer(Protocol):
    """Host memory, and whether the device has read it."""

    def done(self) -> bool:
        """Tell whether the last copy from it is done; does not wait."""
        ...


B = TypeVar("B", bound=Buffer)


class Ring(Generic[B]):
    """Buffers by size, in the order in which they were taken: what was taken first is done first.

    `allocate(size)` makes one of so many bytes. Nothing waits: while all are busy there is one more.
    """

    def __init__(self, allocate: Callable[[int], B]) -> None:
        self._allocate = allocate
        self._buffers: dict[int, deque[B]] = {}
        self.bytes = 0

    @property
    def buffers(self) -> int:
        """How many there are: constant once there are enough."""
        return sum(map(len, self._buffers.values()))

    def take(self, size: int) -> B:
        """Return a buffer of at least `size` bytes that nothing is copied from; the caller begins a copy
        from it before it takes another one.
        """
        size = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
        buffers = self._buffers.setdefault(size, deque())
        if not buffers or not buffers[0].done():
            buffers.appendleft(self._allocate(size))
            self.bytes += size
        buffers.rotate(-1)
        return buffers[-1]
