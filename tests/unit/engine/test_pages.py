"""Pages: who holds them, and what is shared and copied."""

import pytest
import torch

from worker.engine import kv, pages

LAYOUT = kv.Layout(((1, 2, 2), (2, 4, 4)), torch.float64, torch.device("cpu"))


def memory(count: int = 10) -> pages.Memory:
    return pages.Memory(LAYOUT, count * 4 * LAYOUT.token_bytes, page_tokens=4)


def test_used_bytes_are_those_of_pages_that_somebody_holds() -> None:
    m = memory()
    run = m.run(start=6, tokens=3)  # positions 6 to 8: two pages
    assert m.used == 2 * m.page_bytes == m.run_tokens(6, 3) * LAYOUT.token_bytes
    slot = m.slot(8, 5, [m.run(0, 6), run])
    assert m.free_pages == 10 - 2 - 2 - 2
    slot.release()
    assert m.free_pages == 6


def test_memory_ends() -> None:
    m = memory(2)
    assert m.fits(8)
    assert not m.fits(12)
    m.take(2)
    with pytest.raises(MemoryError, match="1 pages wanted, 0 free"):
        m.take(1)


def test_page_0_is_nobodys() -> None:
    assert sorted(memory(10).take(10)) == list(range(1, 11))


@pytest.mark.parametrize("at", range(1, 10))
def test_the_halves_of_a_run_hold_the_page_between_them(at: int) -> None:
    m = memory()
    run = m.run(start=2, tokens=10)
    before = list(run.pages)
    upper, lower = run.split(at)
    assert (upper.start, upper.tokens, lower.start, lower.tokens) == (2, at, 2 + at, 10 - at)
    assert pages.table_of([upper, lower], 4) == before
    upper.release()
    assert m.free_pages == 10 - len(lower.pages)
    lower.release()
    assert m.free_pages == 10


def test_what_begins_inside_a_page_takes_a_copy_of_it_unless_it_has_that_page() -> None:
    m = memory()
    parent = m.run(0, 6)
    child = m.run(6, 5)
    assert m.beginning(child, parent) == {child.pages[0]: (parent.pages[1], 2)}
    upper, lower = child.split(3)
    assert m.beginning(lower, upper) is None
    assert m.beginning(m.run(8, 1), m.run(0, 8)) is None


def test_a_slot_that_has_grown_has_what_it_had() -> None:
    m = memory()
    slot = m.slot(4, 3, [m.run(0, 7)])
    before = slot.table.tolist()
    assert slot.capacity == 4
    assert slot.grown().table.tolist()[:-1] == before
    assert slot.capacity == 8


def test_what_a_request_leaves_stays_when_it_has_gone() -> None:
    m = memory()
    slot = m.slot(4, 9, [m.run(0, 4)])
    kept = slot.run(1, 5)  # positions 5 to 9
    assert (kept.start, kept.pages) == (5, slot.table[1:3].tolist())
    slot.release()
    assert m.free_pages == 10 - 1 - 2
    kept.release()
    assert m.free_pages == 9


def test_tokens_are_copied_all_at_once() -> None:
    pool = pages.Pool(LAYOUT, 2, 4)
    for layer in (*pool.keys, *pool.values):
        layer += torch.arange(8.0).view(2, 4, 1, 1)
    pool.copy(torch.tensor([1, 5]), torch.tensor([5, 6]))
    for layer in (*pool.keys, *pool.values):
        assert layer.flatten(0, 1)[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 1, 5, 7]


def test_a_run_may_begin_on_the_last_page_of_the_one_before() -> None:
    m = memory()
    before = m.run(0, 6)
    after = m.run(6, 5, before)
    assert after.pages[0] == before.pages[-1]
    assert m.beginning(after, before) is None
    assert m.run(8, 4, m.run(0, 8)).pages != before.pages
    before.release()
    after.release()
    assert m.free_pages == 10 - 3


def test_nothing_is_copied_to_a_page_that_was_taken_since() -> None:
    m = memory()
    run = m.run(0, 4)
    m.copies = {run.pages[0]: (9, 2)}
    run.release()
    assert run.pages == m.take(1)
    assert m.copies == {}
