"""File records: found by their tenant only, expired ones absent, pages without gaps."""

import io
from pathlib import Path

import pytest

from jobs import errors, ids
from jobs.files import Files, made_at
from jobs.store_local import LocalStore


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files(tmp_path: Path, clock: Clock) -> Files:
    return Files(LocalStore(str(tmp_path)), clock)


def add(files: Files, name: str = "a.jsonl", purpose: str = "batch", seconds: int | None = None) -> str:
    return files.add("default", name, purpose, io.BytesIO(b"{}\n"), seconds).id


def test_a_file_is_found_by_its_tenant_only(files: Files) -> None:
    file_id = add(files)
    assert files.get("default", file_id).bytes == 3
    with pytest.raises(errors.NotFound):
        files.get("other", file_id)


@pytest.mark.parametrize("name", ["", "..", "file-../x", "file-", "batch_" + "0" * 26, "file-" + "0" * 26])
def test_an_id_that_is_none_is_not_found(files: Files, name: str) -> None:
    with pytest.raises(errors.NotFound):
        files.get("default", name)


def test_an_expired_file_is_absent(files: Files, clock: Clock) -> None:
    file_id = add(files, seconds=3600)
    created = files.get("default", file_id).created_at
    clock.now = created + 3599
    assert [record.id for record in files.newest("default")] == [file_id]
    clock.now = created + 3600
    assert files.newest("default") == []
    with pytest.raises(errors.NotFound):
        files.get("default", file_id)


def test_pages_cover_every_file_once_in_both_orders(files: Files) -> None:
    made = [add(files) for _ in range(7)]
    for descending in (True, False):
        seen: list[str] = []
        more, after = True, None
        while more:
            records, more = files.page("default", None, 3, descending, after)
            seen += [record.id for record in records]
            after = seen[-1]
        assert sorted(seen) == sorted(made)
        assert seen == sorted(made, reverse=descending)


def test_paging_goes_on_behind_a_file_that_was_deleted(files: Files) -> None:
    made = sorted((add(files) for _ in range(4)), reverse=True)
    fresh = Files(files.store)
    fresh.delete(fresh.get("default", made[1]), keep_bytes=False)
    records, more = fresh.page("default", None, 10, True, made[1])
    assert ([record.id for record in records], more) == (made[2:], False)


@pytest.mark.parametrize("letter", "ilou-_.")
def test_a_page_behind_what_only_looks_like_an_id_is_refused(files: Files, letter: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="after must be the id of a file"):
        files.page("default", None, 10, True, f"file-{letter * 26}")


def test_a_list_can_be_narrowed_to_a_purpose(files: Files) -> None:
    wanted = add(files, purpose="user_data")
    add(files)
    assert [record.id for record in files.newest("default", "user_data")] == [wanted]


def test_delete_takes_the_bytes_unless_a_job_still_reads_them(files: Files) -> None:
    for keep in (True, False):
        record = files.get("default", add(files))
        files.delete(record, keep_bytes=keep)
        assert (files.store.size(record.key) is not None) is keep


def test_the_time_in_an_id_is_its_time_of_creation() -> None:
    from time import time

    before = time()
    assert before - 0.002 <= made_at(ids.file_id()) <= time()
