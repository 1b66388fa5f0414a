"""Where all that must outlive a process lies: files, jobs, plans, parts, results. One face, two stores."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from jobs import errors
from jobs.settings import Settings

# No segment begins with a dot: neither '.' and '..' nor the names LocalStore keeps for itself can be keys.
_SEGMENT = r"[\w@+=,:~-][\w.@+=,:~-]*"
_KEY = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*", re.ASCII)
STREAMED = ("files/", "jobs/")
"""Where large objects are written: what lies half-written under other names of a bucket is not ours."""

_PREFIX = re.compile(rf"({_SEGMENT}/)*({_SEGMENT})?", re.ASCII)


@dataclass(frozen=True)
class Object:
    """What `list` tells of an object: its key, its size in bytes, and when it was written (unix seconds)."""

    key: str
    size: int
    modified: float = field(default=0.0, compare=False)


class Writer(Protocol):
    """The end of `writer` that takes bytes."""

    def write(self, data: bytes, /) -> int: ...


class ObjectStore(Protocol):
    """A flat map of keys to bytes, shared by every process, safe for threads.

    Failures that may pass are retried inside; what still fails, or cannot pass, raises StoreUnreachable.
    A key that is not ours to use (absolute, with '..' or odd characters) raises InvalidRequest.
    """

    url: str

    def put(self, key: str, data: bytes | BinaryIO) -> int:
        """Write an object, replacing the old one at once; return its bytes. A file object is streamed."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Write an object unless its key exists; tell whether this call wrote it. One of many wins."""
        ...

    def get(self, key: str) -> bytes:
        """Return the bytes of an object. Raises NotFound."""
        ...

    def open(self, key: str, start: int = 0) -> BinaryIO:
        """Open an object for streaming from byte `start`; past its end there is nothing. Raises NotFound."""
        ...

    def size(self, key: str) -> int | None:
        """Return the bytes of an object, None if there is none."""
        ...

    def list(self, prefix: str, after: str = "", before: str = "") -> Iterator[Object]:
        """Yield the objects whose keys begin with `prefix` (any beginning, also half a name), in no order.

        With `after` or `before`: only those whose keys sort behind the one, or before the other.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; it is fine if there is none."""
        ...

    def writer(self, key: str) -> AbstractContextManager[Writer]:
        """Stream into an object that is visible only after a clean exit; an exception leaves nothing."""
        ...

    def clean(self, before: float, dry_run: bool = False) -> Iterator[int]:
        """Remove what writers that were killed had begun before a time (unix s); yield the bytes of each."""
        ...

    def check(self) -> None:
        """Raise StoreUnreachable, in seconds, if the store is absent, silent, or refuses the keys."""
        ...


def open_store(settings: Settings, hurried: bool = False) -> ObjectStore:
    """Return the store that `store_url` names: `s3://bucket[/prefix]` or `file://directory`.

    `hurried`: somebody waits for the answer, so a call that fails is given up after some 20 seconds.
    """
    scheme, found, rest = settings.store_url.partition("://")
    if not found or not rest:
        scheme = ""
    if scheme == "file":
        from jobs import store_local

        return store_local.LocalStore(rest)
    if scheme == "s3":
        from jobs import store_s3  # boto3 takes a third of a second to import

        return store_s3.S3Store(settings, hurried)
    raise errors.SettingsError(
        f"LONGHAUL_STORE_URL must be s3://bucket[/prefix] or file://directory, not {settings.store_url!r}."
    )


def checked_key(key: str) -> str:
    """Return `key` if it may stand in a store, else raise InvalidRequest."""
    if _KEY.fullmatch(key) is None:
        raise errors.InvalidRequest(f"{key!r} is not a key of the store.")
    return key


def checked_prefix(prefix: str) -> str:
    """Return `prefix` if keys can begin with it, else raise InvalidRequest."""
    if _PREFIX.fullmatch(prefix) is None:
        raise errors.InvalidRequest(f"{prefix!r} is not a prefix of keys of the store.")
    return prefix
