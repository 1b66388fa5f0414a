"""Few recorded sizes, little padding."""

from worker.engine import graph_shapes

SIZES = [graph_shapes.rows_for(rows) for rows in range(1, 1025)]


def test_the_padding_of_larger_batches_is_under_a_quarter() -> None:
    for rows, size in enumerate(SIZES, 1):
        assert rows <= size
        assert graph_shapes.rows_for(size) == size
        assert (size - rows) * 4 < rows or size - rows < 8
        assert (size - rows) * 4 < rows or rows < 32


def test_few_sizes_serve_all_batches() -> None:
    assert sorted({*SIZES})[:12] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80]
    assert sorted(SIZES) == SIZES
    assert len({*SIZES}) == 27


def test_powers_of_two() -> None:
    assert [graph_shapes.power_for(size) for size in (0, 1, 2, 3, 4, 5, 64, 65)] == [
        0,
        1,
        2,
        4,
        4,
        8,
        64,
        128,
    ]
