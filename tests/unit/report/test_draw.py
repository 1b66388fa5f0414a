"""What is written above the marks of a histogram."""

import pytest

from jobs.report import draw

MARKS: list[tuple[dict[str, float], list[tuple[str, float]]]] = [
    ({"p50": 0.1, "p90": 0.5, "p99": 0.9}, [("p50", 0.1), ("p90", 0.5), ("p99", 0.9)]),
    ({"p50": 0.4, "p90": 0.4, "p99": 0.4}, [("p50\N{EN DASH}p99", 0.4)]),
    ({"p50": 0.1, "p90": 0.8, "p99": 0.9}, [("p50", 0.1), ("p90\N{EN DASH}p99", 0.85)]),
    ({"p50": 0.1, "p90": 0.2, "p99": 0.5}, [("p50\N{EN DASH}p90", 0.15), ("p99", 0.5)]),
    ({"p50": 0.3}, [("p50", 0.3)]),
    ({}, []),
]


@pytest.mark.parametrize(("marks", "labels"), MARKS)
def test_each_mark_is_named_and_those_that_fall_together_share_a_label(
    marks: dict[str, float], labels: list[tuple[str, float]]
) -> None:
    found = draw.labels(marks)
    assert [name for name, _ in found] == [name for name, _ in labels]
    assert [place for _, place in found] == pytest.approx([place for _, place in labels])
