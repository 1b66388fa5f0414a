"""The store that fails on purpose fails as told."""

from pathlib import Path

import pytest

from jobs import errors, store_faults
from jobs.store import ObjectStore
from jobs.store_local import LocalStore


@pytest.fixture
def inner(tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path)


def test_fail_times_fails_first_and_does_nothing(inner: ObjectStore) -> None:
    store = store_faults.FaultyStore(inner, {"put": store_faults.FailTimes(2, OSError("gone"))})
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            store.put("a", b"x")
    assert inner.size("a") is None
    assert store.put("a", b"x") == 1


def test_fail_after_fails_for_ever(inner: ObjectStore) -> None:
    store = store_faults.FaultyStore(inner, {"*": store_faults.FailAfter(2)})
    store.put("a", b"x")
    assert store.get("a") == b"x"
    for _ in range(3):
        with pytest.raises(errors.StoreUnreachable, match="injected fault"):
            store.size("a")


def test_lost_answer_comes_after_the_deed(inner: ObjectStore) -> None:
    store = store_faults.FaultyStore(inner, {"put_new": store_faults.LoseAnswers(1)})
    with pytest.raises(errors.StoreUnreachable):
        store.put_new("a", b"x")
    assert store.put_new("a", b"y") is False
    assert inner.get("a") == b"x"


def test_writer_that_fails_shows_nothing(inner: ObjectStore) -> None:
    store = store_faults.FaultyStore(inner, {"writer": store_faults.FailTimes(1)})
    with pytest.raises(errors.StoreUnreachable), store.writer("a") as out:
        out.write(b"x")
    assert list(inner.list("")) == []
    with store.writer("a") as out:
        out.write(b"x")
    assert inner.get("a") == b"x"


def test_operations_without_a_fault_pass_through(inner: ObjectStore) -> None:
    store = store_faults.FaultyStore(inner, {})
    store.check()
    store.put("a/b", b"xyz")
    assert [found.key for found in store.list("a/")] == ["a/b"]
    with store.open("a/b", 1) as file:
        assert file.read() == b"yz"
    store.delete("a/b")
    assert store.size("a/b") is None
