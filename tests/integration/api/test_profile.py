"""A batch's profile over HTTP: read part by part, the same while it runs and after it ended."""

import pytest

from api import profiles
from tests.integration.api.serving import Api, Hand


def test_a_profile_grows_with_the_parts_and_is_the_same_after_the_end(api: Api) -> None:
    job = api.create("a", "b", "c")
    path = f"/v1/batches/{job}/profile"
    hand = Hand(api.context, job, 3)
    hand.begin()
    empty = api.http.get(path).json()
    assert (empty["parts"], empty["rows"], empty["timeline"]) == (0, 0, None)
    hand.part((0, "a", False))
    assert api.http.get(path).json()["rows"] == 1
    hand.part((1, "b", True), (2, "c", False))
    running = api.http.get(path).json()
    assert (running["parts"], running["parts_read"], running["rows"]) == (2, 2, 3)
    assert sum(running["latency"]["e2e_seconds"]["counts"]) == 2
    (error,) = running["errors"]["first"]
    assert (error["request"], error["custom_id"]) == (2, "b")
    hand.end()
    hand.finish()
    assert api.http.get(path).json() == running
    assert api.http.get("/v1/batches/batch_none/profile").status_code == 404


def test_one_call_reads_no_longer_than_it_may_and_the_next_goes_on(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_READ_SECONDS", 0)
    job = api.create("a", "b")
    hand = Hand(api.context, job, 2)
    hand.begin()
    hand.part((0, "a", False))
    hand.part((1, "b", False))
    seen = [api.http.get(f"/v1/batches/{job}/profile").json() for _ in range(3)]
    assert [(one["parts_read"], one["parts"]) for one in seen] == [(1, 2), (2, 2), (2, 2)]
    assert [one["rows"] for one in seen] == [1, 2, 2]
