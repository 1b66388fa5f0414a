"""A bounded memory of records that never change once they are written, though they may be deleted."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """Remember up to `size` results of `read`, the least recently used forgotten first; never a None."""

    def __init__(self, read: Callable[[str], T | None], size: int) -> None:
        self._read = read
        self._size = size
        self._found: OrderedDict[str, T] = OrderedDict()
        self._lock = Lock()

    def __call__(self, name: str) -> T | None:
        """Return what `read` once returned for `name`; safe for threads."""
        with self._lock:
            if name in self._found:
                self._found.move_to_end(name)
                return self._found[name]
        value = self._read(name)
        if value is not None:
            with self._lock:
                self._found[name] = value
                while len(self._found) > self._size:
                    self._found.popitem(last=False)
        return value

    def forget(self, name: str) -> None:
        """Read `name` anew the next time."""
        with self._lock:
            self._found.pop(name, None)
