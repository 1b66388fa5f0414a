"""Why rows failed: few reasons out of many rows."""

from pathlib import Path

from jobs.dataset import reasons
from jobs.dataset.output import apart


def test_reasons_that_differ_in_values_and_positions_alone_are_one_with_the_first_place(
    tmp_path: Path,
) -> None:
    with apart.Apart(tmp_path) as aside:
        for row in range(3):
            aside.fault(apart.Fault(row, f"line {row}", 0, "s", "row_unfit", "text is null"))
            where = f"Could not convert string 'v{row}' to INT32"
            aside.fault(apart.Fault(row, f"line {row}", 0, "s", "unreadable", where))
        for row in range(4):
            error = f'not JSON: "{row}" at line 1 column {row}'
            aside.invalid(apart.Invalid(row, f"line {row}", 0, "s", "{", error, {}))
        aside.publish()
    assert reasons.read(tmp_path) == [
        reasons.Reason("invalid", 'not JSON: "0" at line 1 column 0', 4, "line 0"),
        reasons.Reason("row_unfit", "text is null", 3, "line 0"),
        reasons.Reason("unreadable", "Could not convert string 'v0' to INT32", 3, "line 0"),
    ]


def test_a_message_in_a_code_of_its_own_is_a_reason_of_its_own() -> None:
    found = reasons.Reasons()
    for code in ("a", "b"):
        found.add(code, "the model's own", "")
    assert [(one.code, one.count) for one in found.told()] == [("a", 1), ("b", 1)]


def test_however_many_reasons_there_are_few_are_kept_and_all_are_counted() -> None:
    found = reasons.Reasons()
    for number in range(1000):
        found.add("c", "x" * (number + 1 if number < 150 else 10_000) + "\n", f"line {number}")
    told = found.told()
    assert len(told) == reasons.MOST + 1
    assert told[-1] == reasons.Reason(reasons.OTHERS, "", 900, "line 100")
    assert sum(one.count for one in told) == 1000
    assert max(len(one.message) for one in told) <= 200


def test_a_run_without_faults_has_no_reasons(tmp_path: Path) -> None:
    assert reasons.read(tmp_path) == []
