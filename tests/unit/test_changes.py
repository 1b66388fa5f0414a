"""Which events are kept for those who come back."""

from typing import cast

import pytest

from api.changes import Changes, News
from api.context import Context


@pytest.fixture
def kept() -> Changes:
    return Changes(cast(Context, None))


def keep(changes: Changes, count: int, size: int) -> None:
    for _ in range(count):
        changes.last += 1
        changes.keep(News(changes.last, "t", "batch", b"x" * size))


def test_events_that_are_kept_are_few_or_small(kept: Changes) -> None:
    keep(kept, 5000, 1)
    assert len(kept.news) == 4096
    keep(kept, 40, 1_000_000)
    assert sum(len(one.data) for one in kept.news) <= 8 << 20
    keep(kept, 5000, 1)
    assert len(kept.news) == 4096


def test_who_missed_an_event_that_is_not_kept_looks_anew(kept: Changes) -> None:
    keep(kept, 10, 1_000_000)
    assert kept.after(1, "t") is None
    assert kept.after(kept.last - 1, "t") == [kept.news[-1]]
    keep(kept, 1, 20_000_000)
    assert len(kept.news) == 1
