"""The store in a directory."""

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from jobs import errors, store_local
from jobs.settings import Settings
from jobs.store import ObjectStore, open_store
from tests.store_contract import StoreContract


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def objects(root: Path) -> ObjectStore:
    return store_local.LocalStore(root)


def drafts(root: Path) -> list[str]:
    return os.listdir(root / ".tmp") if (root / ".tmp").exists() else []


class TestLocalStore(StoreContract):
    def assert_no_drafts(self, objects: ObjectStore) -> None:
        assert drafts(Path(objects.url.removeprefix("file://"))) == []

    def test_where_hard_links_are_not_known_one_put_new_still_wins(
        self, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def link(source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(store_local.os, "link", link)
        self.test_put_new_writes_only_once(objects)
        self.test_one_of_many_put_new_wins(objects)


def test_url_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store(Settings(store_url="file://./a/b")).url == f"file://{tmp_path}/a/b"
    assert open_store(Settings(store_url=f"file://{tmp_path}/c")).url == f"file://{tmp_path}/c"
    relative = open_store(Settings(store_url="file://here"))
    monkeypatch.chdir("/")
    relative.put("a", b"x")
    assert (tmp_path / "here" / "a").read_bytes() == b"x"


@pytest.mark.parametrize(
    "url", ["", "store", "/tmp/store", "http://a/b", "file://", "s3://", "s3://k:secret@b"]
)
def test_url_that_names_no_store_is_a_settings_error(url: str) -> None:
    with pytest.raises(errors.SettingsError, match="LONGHAUL_STORE_URL") as caught:
        open_store(Settings(store_url=url))
    assert "secret" not in str(caught.value)


def test_object_is_durable_before_it_is_visible(
    objects: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append("draft" if "/.tmp/" in path else os.path.relpath(path, root))
        assert synced[0] == "draft"
        assert (root / "a/b/c").exists() == (len(synced) > 1)
        fsync(descriptor)

    monkeypatch.setattr(store_local.os, "fsync", note)
    objects.put("a/b/c", b"x")
    assert set(synced) >= {"draft", "a/b", "a", "."}


def test_unusable_directory_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    blocked = store_local.LocalStore(tmp_path / "file" / "store")
    with pytest.raises(errors.StoreUnreachable, match="Not a directory"):
        blocked.check()
    with pytest.raises(errors.StoreUnreachable, match="Not a directory"):
        blocked.put("a", b"x")


def test_full_disk_is_explained_and_leaves_nothing(
    objects: ObjectStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_local.os, "fsync", full)
    with pytest.raises(errors.StoreUnreachable, match=r"No space left on device \(a/b\)"):
        objects.put("a/b", b"x")
    assert list(objects.list("")) == []
    assert drafts(root) == []


def test_object_cannot_lie_below_an_object(objects: ObjectStore) -> None:
    objects.put("a/b", b"1")
    for key in ("a", "a/b/c"):
        with pytest.raises(errors.StoreUnreachable, match=f"({key})"):
            objects.put(key, b"x")
        with pytest.raises(errors.StoreUnreachable, match=f"({key})"):
            objects.put_new(key, b"x")
    assert objects.get("a/b") == b"1"


def test_check_removes_only_what_was_left_long_ago(objects: ObjectStore, root: Path) -> None:
    objects.check()
    for name, age in (("old", 2 * 24 * 3600), ("new", 3600)):
        (root / ".tmp" / name).write_bytes(b"half")
        os.utime(root / ".tmp" / name, (time.time() - age,) * 2)
    objects.check()
    assert drafts(root) == ["new"]


def test_directory_deleted_while_it_is_made_is_made_again(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mkdir() finds the directory, delete() of the last object in it removes it, mkdir() looks for one."""
    make, left = Path.mkdir, [FileExistsError(errno.EEXIST, "File exists")]

    def raced(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if self.name == "gone" and left:
            raise left.pop()
        make(self, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", raced)
    objects.put("gone/1", b"x")
    assert not left
    assert objects.get("gone/1") == b"x"


def _hammer(root: Path, who: int, won: "multiprocessing.Queue[int]") -> None:
    objects = store_local.LocalStore(root)
    for n in range(40):
        won.put(objects.put_new(f"new/{n}", b"%d" % who * 1000))
        objects.put("same/key", b"%d" % who * 1000)
        assert len(set(objects.get("same/key"))) == 1
        objects.put(f"gone/{who}", b"x")
        objects.delete(f"gone/{who}")


def test_processes_share_a_directory(root: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    won = spawn.Queue()
    processes = [spawn.Process(target=_hammer, args=(root, who, won)) for who in range(4)]
    for process in processes:
        process.start()
    wins = sum(won.get(timeout=30) for _ in range(4 * 40))
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert wins == 40
    objects = store_local.LocalStore(root)
    assert all(len(set(objects.get(f"new/{n}"))) == 1 for n in range(40))
    assert list(objects.list("gone/")) == []
    assert drafts(root) == []
