"""A store that fails on purpose, for tests of what is built on one."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO, Protocol

from jobs import errors, store


class Fault(Protocol):
    """When an operation fails: `before` and `after` raise, or do nothing."""

    def before(self) -> None: ...

    def after(self) -> None: ...


class _Counted:
    def __init__(self, n: int, error: Exception | None = None) -> None:
        self._left, self._lock = n, threading.Lock()
        self._error = error or errors.StoreUnreachable(url="faulty://", reason="injected fault")

    def before(self) -> None:
        pass

    def after(self) -> None:
        pass

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0


class FailTimes(_Counted):
    """The first `n` operations fail and do nothing."""

    def before(self) -> None:
        if self._take():
            raise self._error


class FailAfter(_Counted):
    """`n` operations succeed, all later ones fail and do nothing."""

    def before(self) -> None:
        if not self._take():
            raise self._error


class LoseAnswers(_Counted):
    """The first `n` operations are done, and then reported as failed."""

    def after(self) -> None:
        if self._take():
            raise self._error


class FaultyStore:
    """`inner` with `faults`: name of an operation ('put', 'writer', ..., or '*' for each) -> fault.

    `open` fails when called, `list` at its first object, `writer` at its end, with nothing visible.
    """

    def __init__(self, inner: store.ObjectStore, faults: Mapping[str, Fault]) -> None:
        self._inner, self._faults = inner, faults
        self.url = inner.url

    def put(self, key: str, data: bytes | BinaryIO) -> int:
        with self._faulty("put"):
            return self._inner.put(key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        with self._faulty("put_new"):
            return self._inner.put_new(key, data)

    def get(self, key: str) -> bytes:
        with self._faulty("get"):
            return self._inner.get(key)

    def open(self, key: str, start: int = 0) -> BinaryIO:
        with self._faulty("open"):
            return self._inner.open(key, start)

    def size(self, key: str) -> int | None:
        with self._faulty("size"):
            return self._inner.size(key)

    def list(self, prefix: str, after: str = "", before: str = "") -> Iterator[store.Object]:
        with self._faulty("list"):
            yield from self._inner.list(prefix, after, before)

    def delete(self, key: str) -> None:
        with self._faulty("delete"):
            self._inner.delete(key)

    @contextmanager
    def writer(self, key: str) -> Iterator[store.Writer]:
        faults = [self._faults[name] for name in ("writer", "*") if name in self._faults]
        with self._inner.writer(key) as out:
            yield out
            for fault in faults:
                fault.before()
        for fault in faults:
            fault.after()

    def clean(self, before: float, dry_run: bool = False) -> Iterator[int]:
        with self._faulty("clean"):
            yield from self._inner.clean(before, dry_run)

    def check(self) -> None:
        with self._faulty("check"):
            self._inner.check()

    @contextmanager
    def _faulty(self, operation: str) -> Iterator[None]:
        faults = [self._faults[name] for name in (operation, "*") if name in self._faults]
        for fault in faults:
            fault.before()
        yield
        for fault in faults:
            fault.after()
