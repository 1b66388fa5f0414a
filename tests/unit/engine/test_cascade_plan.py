"""Which pages are read once for several rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.engine import cascade

tables = st.lists(st.lists(st.integers(1, 3), max_size=7), min_size=1, max_size=9)


def plan(tables: list[list[int]], least_saved: int = 1) -> list[cascade.Segment]:
    return cascade.plan([np.array(table, dtype=np.int32) for table in tables], least_saved)


def test_what_all_have_is_read_once_and_then_what_some_have() -> None:
    found = plan([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [6]])
    assert [(sorted(s.rows), s.first, s.last) for s in found] == [([0, 1, 2], 0, 2), ([0, 1], 2, 3)]
    assert cascade.starts(found, 4) == [3, 3, 2, 0]


def test_too_little_is_left_alone_unless_more_hangs_on_it() -> None:
    assert plan([[1, 2], [1, 3]], least_saved=2) == []
    deeper = plan([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]], least_saved=3)
    assert [(s.first, s.last) for s in deeper] == []
    found = plan([[1, 2, 3, 4, 7], [1, 2, 3, 4, 8], [1, 6]], least_saved=3)
    assert [(sorted(s.rows), s.first, s.last) for s in found] == [([0, 1, 2], 0, 1), ([0, 1], 1, 4)]


@given(tables, st.integers(1, 5))
def test_segments_cover_the_front_of_each_row_without_a_gap(tables: list[list[int]], least: int) -> None:
    found = plan(tables, least)
    for segment in found:
        assert len(segment.rows) > 1
        assert len({tuple(tables[row][segment.first : segment.last]) for row in segment.rows}) == 1
    for row, start in enumerate(cascade.starts(found, len(tables))):
        mine = [(s.first, s.last) for s in found if row in s.rows]
        assert [page for first, last in mine for page in range(first, last)] == list(range(start))


@given(st.integers(0, 50), st.integers(1, 400), st.sampled_from((2, 64, 100, 4000)))
def test_pieces_are_the_segment(first: int, pages: int, queries: int) -> None:
    pieces = cascade.Segment([0, 1], first, first + pages).pieces(queries)
    assert len(pieces) * queries <= max(1024, queries)
    assert [page for p in pieces for page in range(p.first, p.last)] == list(range(first, first + pages))
    assert len(pieces) <= 16
