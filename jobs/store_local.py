"""The store in a directory: for one machine, for tests, and for `longhaul run`."""

import errno
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from jobs import errors, ids, store
from jobs.metrics import shared

log = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
_LEFTOVER_SECONDS = 24 * 3600
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class LocalStore:
    """An ObjectStore in `root`: keys are paths. Drafts lie in `.tmp` and are moved into place when synced.

    Unlike S3 it cannot hold both `a` and `a/b`: an object is a file, and what is above it is a directory.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(os.path.expanduser(root)).absolute()
        self._temporary = self._root / ".tmp"
        self.url = f"file://{self._root}"

    @shared.store_put.time()
    def put(self, key: str, data: bytes | BinaryIO) -> int:
        with self.writer(key) as out:
            if not isinstance(data, bytes):
                shutil.copyfileobj(data, out, _BUFFER_BYTES)
                return out.size
            return out.write(data)

    def put_new(self, key: str, data: bytes) -> bool:
        if self.size(key) is not None:
            return False
        out = _Draft(self, key)
        try:
            out.write(data)
            return out.publish(self._link)
        finally:
            out.discard()

    def get(self, key: str) -> bytes:
        with self.open(key) as file:
            return file.read()

    def open(self, key: str, start: int = 0) -> BinaryIO:
        path = self.path(key)
        with self.explained(key):
            try:
                file = open(path, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115
            except _ABSENT:
                raise errors.NotFound(what="object", id=key) from None
            file.seek(start)
            return file

    def size(self, key: str) -> int | None:
        path = self.path(key)
        with self.explained(key):
            try:
                found = path.stat()
            except _ABSENT:
                return None
            return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str, after: str = "", before: str = "") -> Iterator[store.Object]:
        folder, _, beginning = store.checked_prefix(prefix).rpartition("/")

        def wanted(key: str) -> bool:
            return key > after and (not before or key < before)

        return self._walk(f"{folder}/" if folder else "", beginning, wanted)

    def delete(self, key: str) -> None:
        path = self.path(key)
        with self.explained(key):
            try:
                path.unlink()
            except _ABSENT:
                return
            # S3 has no directories, so nothing there outlives its last object; nor does it here.
            for folder in path.parents:
                if folder == self._root:
                    break
                try:
                    folder.rmdir()
                except OSError:  # not empty, or another process was faster
                    break

    @contextmanager
    def writer(self, key: str) -> Iterator["_Draft"]:
        out = _Draft(self, key)
        try:
            yield out
            out.publish(_replace)
        finally:
            out.discard()

    def clean(self, before: float, dry_run: bool = False) -> Iterator[int]:
        with self.explained(""), suppress(FileNotFoundError), os.scandir(self._temporary) as drafts:
            for draft in drafts:
                with suppress(FileNotFoundError):  # another process was faster
                    found = draft.stat()
                    if draft.name != "lock" and found.st_mtime < before:
                        if not dry_run:
                            os.unlink(draft)
                        yield found.st_size

    def check(self) -> None:
        """Make the directory and write into it; remove what processes killed a day ago left half-written."""
        with self.explained(""):
            self._temporary.mkdir(parents=True, exist_ok=True)
            probe = self._temporary / ids.ulid()
            probe.touch(exist_ok=False)
            probe.unlink()
        for _ in self.clean(time.time() - _LEFTOVER_SECONDS):
            pass

    def path(self, key: str) -> Path:
        return self._root / store.checked_key(key)

    def draft_path(self) -> Path:
        return self._temporary / ids.ulid()

    @contextmanager
    def explained(self, key: str) -> Iterator[None]:
        """Turn what the operating system says (disk full, not permitted) into StoreUnreachable."""
        try:
            yield
        except OSError as error:
            shared.store_errors.inc()
            reason = error.strerror or type(error).__name__
            raise errors.StoreUnreachable(
                url=self.url, reason=f"{reason} ({key})" if key else reason
            ) from error

    def move_into_place(self, draft: Path, key: str, place: Callable[[Path, Path], bool]) -> bool:
        target = self.path(key)
        attempts = 100
        while True:
            missing = [folder for folder in target.parents if not folder.exists()]
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                placed = place(draft, target)
                break
            except (FileNotFoundError, FileExistsError):
                # delete() took the empty directory away, perhaps while mkdir() looked at what it had found.
                attempts -= 1
                if not attempts or target.is_dir() or target.parent.is_file():
                    raise
        for folder in (target.parent, *(folder.parent for folder in missing)):
            _sync_folder(folder)
        return placed

    def _link(self, draft: Path, target: Path) -> bool:
        try:
            os.link(draft, target)
            return True
        except FileExistsError:
            if target.is_dir():
                raise
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
        log.warning("no hard links, using a lock", extra={"store": self.url})
        with (self._temporary / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return not target.exists() and _replace(draft, target)

    def _walk(self, folder: str, beginning: str, wanted: Callable[[str], bool]) -> Iterator[store.Object]:
        """Yield the wanted objects below `folder` ('' or 'a/b/') whose next name starts with `beginning`."""
        with self.explained(folder):
            try:
                entries = os.scandir(self._root / folder)
            except _ABSENT:
                return
        with entries:
            for entry in entries:
                if not entry.name.startswith(beginning) or entry.name.startswith("."):
                    continue
                key = folder + entry.name
                if entry.is_dir():
                    yield from self._walk(f"{key}/", "", wanted)
                    continue
                if not wanted(key):
                    continue
                with suppress(FileNotFoundError):  # deleted since the directory was read
                    found = entry.stat()
                    yield store.Object(key, found.st_size, found.st_mtime)


class _Draft:
    """A file that is not in the store yet."""

    def __init__(self, home: LocalStore, key: str) -> None:
        self._home, self._key = home, store.checked_key(key)
        self.size = 0
        self._path = home.draft_path()
        with home.explained(key):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "xb", buffering=_BUFFER_BYTES)  # noqa: SIM115

    def write(self, data: bytes, /) -> int:
        with self._home.explained(self._key):
            self._file.write(data)
        self.size += len(data)
        return len(data)

    def publish(self, place: Callable[[Path, Path], bool]) -> bool:
        """Make the file durable and let `place` give it its name; return what that says."""
        with self._home.explained(self._key):
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._home.move_into_place(self._path, self._key, place)

    def discard(self) -> None:
        """Close the file and remove what is left of it: nothing, once it was moved."""
        with suppress(OSError):  # a full disk: closing flushes, and what is flushed goes away
            self._file.close()
        self._path.unlink(missing_ok=True)


def _replace(draft: Path, target: Path) -> bool:
    os.replace(draft, target)
    return True


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # its only object was deleted again: nothing left to make durable
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
