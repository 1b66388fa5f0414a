"""What a process knows of the keys: how old it may be, who reads, and what holds when the store is silent."""

import logging
import threading
import time
from pathlib import Path

import pytest

from api.keyring import Keyring
from jobs import errors, keys
from jobs.store_faults import FailAfter, FailTimes, FaultyStore
from jobs.store_local import LocalStore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Counting(FailTimes):
    """No fault, but a count and a pause."""

    def __init__(self, seconds: float = 0) -> None:
        super().__init__(0)
        self.calls, self.seconds = 0, seconds

    def before(self) -> None:
        self.calls += 1
        time.sleep(self.seconds)


@pytest.fixture
def objects(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_new_key_and_a_revocation_count_after_five_seconds(objects: LocalStore, clock: Clock) -> None:
    ring = Keyring(objects, clock)
    assert not ring.known()
    record, key = keys.create(objects, "one")
    clock.now += 5
    assert keys.tenant_of(ring.known(), key) == "one"
    keys.revoke(objects, record.id)
    clock.now += 5
    with pytest.raises(errors.Unauthorized):
        keys.tenant_of(ring.known(), key)
    assert list(ring.known()) == [record.id]


def test_many_requests_read_the_store_once_and_what_is_known_never_again(
    objects: LocalStore, clock: Clock
) -> None:
    record, _ = keys.create(objects, "one")
    keys.create(objects, "one")
    keys.revoke(objects, record.id)
    lists, gets = Counting(), Counting()
    ring = Keyring(FaultyStore(objects, {"list": lists, "get": gets}), clock)
    for _ in range(50):
        ring.known()
    assert (lists.calls, gets.calls) == (1, 3)
    clock.now += 5
    ring.known()
    assert (lists.calls, gets.calls) == (2, 3)


def test_requests_at_once_share_one_slow_read(objects: LocalStore) -> None:
    keys.create(objects, "one")
    lists = Counting(0.3)
    ring = Keyring(FaultyStore(objects, {"list": lists}))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(ring.known()))) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert (found, lists.calls) == ([1] * 10, 1)


def test_while_the_store_is_silent_what_was_known_stays_valid(
    objects: LocalStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    _, key = keys.create(objects, "one")
    ring = Keyring(FaultyStore(objects, {"list": FailAfter(1)}), clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert keys.tenant_of(ring.known(), key) == "one"
            clock.now += 100
    assert [record.getMessage() for record in caplog.records] == ["API keys not read; those known stay valid"]


def test_a_store_that_lost_its_keys_does_not_open_the_door(
    objects: LocalStore, clock: Clock, tmp_path: Path
) -> None:
    _, key = keys.create(objects, "one")
    ring = Keyring(objects, clock)
    assert ring.known()
    (tmp_path / "keys").rename(tmp_path / "unmounted")
    clock.now += 5
    assert keys.tenant_of(ring.known(), key) == "one"


def test_a_record_that_cannot_be_read_does_not_make_a_key_unknown(objects: LocalStore, clock: Clock) -> None:
    _, key = keys.create(objects, "one")
    ring = Keyring(FaultyStore(objects, {"get": FailAfter(1)}), clock)
    assert ring.known()
    keys.create(objects, "two")
    clock.now += 5
    assert keys.tenant_of(ring.known(), key) == "one"


def test_keys_that_were_never_read_are_503_until_the_store_answers(objects: LocalStore, clock: Clock) -> None:
    _, key = keys.create(objects, "one")
    ring = Keyring(FaultyStore(objects, {"list": FailTimes(1)}), clock)
    for _ in range(3):
        with pytest.raises(errors.Unavailable):
            ring.known()
    clock.now += 5
    assert keys.tenant_of(ring.known(), key) == "one"
