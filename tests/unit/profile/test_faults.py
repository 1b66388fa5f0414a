"""Errors by code and kind."""

import orjson

from jobs.profile import faults
from tests.unit.report import lines


def gathered(*errors: bytes) -> faults.Errors:
    found = faults.Faults()
    for error in errors:
        found.line(orjson.loads(error), None)
    return found.build()


def test_errors_are_told_apart_by_code_and_parameter_the_commonest_first() -> None:
    found = gathered(
        lines.refused("a", code="invalid_value", param="n"),
        lines.refused("b", "too large", code="invalid_value", param="top_p"),
        lines.refused("c", code="invalid_value", param="top_p"),
        lines.refused("d"),
        *(lines.lost(name) for name in "efgh"),
    )
    counts = {code: kind.count for code, kind in found.kinds.items()}
    assert list(counts.items())[:2] == [("worker_lost", 4), ("invalid_value (top_p)", 2)]
    assert counts["invalid_value (n)"] == counts["invalid_request_error"] == 1
    assert found.kinds["worker_lost"].examples == ["e", "f", "g"]
    assert found.kinds["invalid_value (top_p)"].message == "too large"
    assert found.by_code == {"worker_lost": 4, "invalid_value": 3, "invalid_request_error": 1}


def test_kinds_and_texts_of_errors_are_bounded() -> None:
    found = gathered(*(lines.lost("i" * 10**5, "m" * 10**5, f"{n:02}" + "c" * 10**5) for n in range(99)))
    assert len(found.kinds) == faults.MOST_KINDS + 1
    assert found.kinds["others"].count == 99 - faults.MOST_KINDS
    assert max(len(repr(kind)) for kind in found.kinds.values()) < 1000


def test_what_was_told_does_not_change_as_more_errors_come() -> None:
    found = faults.Faults()
    found.line(orjson.loads(lines.lost("a")), 1)
    before = found.build()
    found.line(orjson.loads(lines.lost("b")), 2)
    assert (before.by_code, before.kinds["worker_lost"].examples, len(before.first)) == (
        {"worker_lost": 1},
        ["a"],
        1,
    )
