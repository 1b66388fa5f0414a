from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.scratch import Scratch, Sorter

ITEMS = st.lists(st.tuples(st.integers(-3, 3), st.binary(max_size=4)), max_size=40)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ITEMS, st.integers(1, 60))
def test_a_sort_that_spills_equals_one_in_memory(
    tmp_path: Path, items: list[tuple[int, bytes]], run_bytes: int
) -> None:
    numbered = [(*item, row, "text", b"data") for row, item in enumerate(items)]
    with Sorter(tmp_path, run_bytes) as sorter:
        for item in numbered:
            sorter.add(item, 5)
        assert list(sorter) == sorted(numbered)


def test_a_spill_lies_in_the_scratch_directory(tmp_path: Path) -> None:
    with Sorter(tmp_path / "absent", 1) as sorter, pytest.raises(FileNotFoundError):
        sorter.add((1,), 1)


def test_nothing_is_left_of_a_database(tmp_path: Path) -> None:
    with Scratch(tmp_path, "CREATE TABLE a (b)") as scratch:
        scratch.db.execute("INSERT INTO a VALUES (1)")
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
