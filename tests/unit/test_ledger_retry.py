"""How long a call to Redis may take when Redis hangs, or is away for a moment."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from jobs import errors, ledger_scripts
from jobs.ledger_retry import Bounded


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and says nothing, as a process that was stopped."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"


def test_a_redis_that_hangs_is_told_after_two_timeouts(silent: str) -> None:
    begun = time.monotonic()
    with pytest.raises(errors.RedisUnreachable):
        ledger_scripts.connect(silent, timeout_seconds=0.3)
    assert 0.5 < time.monotonic() - begun < 1.5, "repeats within repeats would take 5 s"


def tries(inside: bool, seconds: float = 60) -> int:
    count = 0

    def fails() -> None:
        nonlocal count
        count += 1
        raise redis.ConnectionError("cut")

    retry = Bounded(seconds)
    call = (lambda: retry.call_with_retry(fails, lambda error: None)) if inside else fails
    with pytest.raises(redis.ConnectionError):
        retry.call_with_retry(call, lambda error: None)
    return count


def test_what_lost_its_connection_is_repeated_and_connecting_within_that_is_not() -> None:
    assert tries(inside=False) == tries(inside=True) == 4
    assert tries(inside=False, seconds=0) == 1


def test_after_an_error_the_next_call_is_repeated_again_and_in_other_threads_too() -> None:
    tries(inside=True)
    found = []
    thread = threading.Thread(target=lambda: found.append(tries(inside=False)))
    thread.start()
    thread.join()
    assert [*found, tries(inside=False)] == [4, 4]
