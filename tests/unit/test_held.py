"""Leases are held until the results of their requests count."""

from types import SimpleNamespace
from typing import Any

from worker.held import Held


def lease(id: str) -> Any:
    return SimpleNamespace(request=SimpleNamespace(id=id))


def test_what_is_finished_is_held_but_not_given_back() -> None:
    held = Held()
    waits, done = lease("a"), lease("b")
    held.add([waits, done])
    held.finish(done)
    assert held.all() == [waits, done]
    assert held.unfinished() == [waits]
    assert held.unwritten
    held.drop([done])
    assert not held.unwritten
    assert held.all() == [waits]


def test_a_request_claimed_anew_is_not_finished() -> None:
    held = Held()
    before, after = lease("a"), lease("a")
    held.add([before])
    held.finish(before)
    held.add([after])
    assert held.unfinished() == [after]
    held.finish(before)
    held.drop([before])
    assert held.unfinished() == [after]
