"""A request with several choices ends as one completion."""

from tests.unit.engine.conftest import request
from worker.engine import Completion, Timings
from worker.engine.choices import Family
from worker.engine.types import Row


def _done(row: Row, timings: Timings, error: str | None = None) -> Completion:
    return Completion(row.id, [1], row.id, "error" if error else "stop", 4, timings, error)


def test_choices_are_in_order_each_with_its_own_timings() -> None:
    family = Family(request("a", [1, 2], n=3, temperature=1.0))
    first, second, third = family.rows
    assert family.take(_done(third, Timings(1.0, 2.0, 3.0))) is None
    assert family.take(_done(first, Timings(4.0, 5.0, 9.0))) is None
    whole = family.take(_done(second, Timings(2.0, 3.0, 8.0)))
    assert whole is not None
    assert whole.id == "a"
    assert [choice.text for choice in whole.choices] == ["a#0", "a#1", "a#2"]
    assert [choice.timings.admitted for choice in whole.choices] == [4.0, 2.0, 1.0]


def test_a_choice_that_fails_is_the_end_of_all() -> None:
    family = Family(request("a", [1, 2], n=2, temperature=1.0))
    failed = family.take(_done(family.rows[1], Timings(1.0, None, 3.0), "a fault"))
    assert failed is not None
    assert (failed.id, failed.error, failed.others) == ("a", "a fault", ())
