"""Pages of a tenant's jobs, newest first, whatever the times at which they were made."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import ids, index, store_local
from jobs.store import Object

YEAR = 365 * 86_400


class Counting(store_local.LocalStore):
    """Counts what is listed."""

    listed = 0

    def list(self, prefix: str, after: str = "", before: str = "") -> Iterator[Object]:
        for found in super().list(prefix, after, before):
            self.listed += 1
            yield found


@pytest.fixture
def objects(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


def jobs(objects: Counting, seconds_ago: list[float]) -> list[str]:
    """Put jobs of that age into the index; return their ids, newest first."""
    now = time.time()
    folder = Path(objects.url.removeprefix("file://")) / "job-index/t"
    folder.mkdir(parents=True)
    made = [f"batch_{ids.time_part(now - ago)}{ids.ulid()[10:]}" for ago in seconds_ago]
    for name in [*made, "batch_" + "0" * 26]:
        (folder / name).touch()
    return [*sorted(made, reverse=True), "batch_" + "0" * 26]


def paged(objects: Counting, count: int) -> list[str]:
    found: list[str] = []
    while page := index.newest(objects, "t", count, found[-1] if found else None):
        assert len(page) <= count
        found += page
    return found


@pytest.mark.parametrize("span", [1.0, 3600.0, 86_400.0, YEAR])
@pytest.mark.parametrize("count", [1, 7, 51])
def test_pages_give_every_job_once_and_newest_first(objects: Counting, span: float, count: int) -> None:
    rng = random.Random(int(span))
    # Some of a clock that is ahead of this one.
    names = jobs(objects, [rng.uniform(-1, 1) * span for _ in range(200)])
    assert paged(objects, count) == names
    assert index.newest(objects, "other", 5, None) == []


@pytest.mark.parametrize("span", [86_400.0, 90 * 86_400.0, YEAR])
def test_a_page_of_many_jobs_reads_a_small_part_of_them(objects: Counting, span: float) -> None:
    many = 3000
    names = jobs(objects, [span * place / many for place in range(many)])
    for after in (None, names[50], names[many // 2]):
        objects.listed = 0
        assert len(index.newest(objects, "t", 51, after)) == 51
        assert objects.listed < many / 4


def test_an_id_of_any_time_is_a_place_in_the_list(objects: Counting) -> None:
    names = jobs(objects, [1.0, 2.0])
    assert index.newest(objects, "t", 9, "batch_" + "z" * 26) == names
    assert index.newest(objects, "t", 9, "batch_" + "0" * 26) == []


def test_jobs_since_a_time_are_all_that_is_listed(objects: Counting) -> None:
    names = jobs(objects, [-5.0, 1.0, 2000.0, *range(3000, 3100)])
    assert sorted(index.since(objects, "t", time.time() - 1000)) == names[1::-1]
    assert objects.listed == 2
