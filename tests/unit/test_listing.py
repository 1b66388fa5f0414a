"""How jobs are listed at any width."""

import pytest

from jobs import client, listing, terminal
from tests.unit.test_client import batch

ID = "batch_01m8psakhmjrvqn2ae9e0917q5"
FAULTS = {"data": [{"code": "invalid_json", "message": "No JSON:\n\x1b[2J" + "x" * 200, "line": 3}] * 5}


def lines(width: int | None, **changes: object) -> list[str]:
    job = client.Batch.model_validate(batch(id=ID, created_at=1796061090) | changes)
    return listing.lines([job], width, terminal.printer(width or listing.UNLIMITED))


def test_a_job_is_told_with_counts_and_a_date_that_can_be_read() -> None:
    counts = {"total": 1640, "completed": 1200, "failed": 34}
    head, row = lines(None, request_counts=counts, model="m" * 100)
    assert head.split() == ["JOB", "STATE", "DONE", "FAILED", "CREATED", "MODEL"]
    assert row.split()[:4] == [ID, "in_progress", "1,234/1,640", "34"]
    assert row.split()[4].startswith("2026-1")
    assert row.endswith("m" * 100)


@pytest.mark.parametrize("width", [40, 60, 71])
@pytest.mark.parametrize("state", ["in_progress", "validating"])
def test_a_narrow_terminal_shows_an_id_on_a_line_of_its_own_and_the_state_whole(
    width: int, state: str
) -> None:
    head, name, row = lines(width, status=state, request_counts={"total": 1640, "completed": 1200})
    assert head.split()[:2] == ["STATE", "DONE"]
    assert name == ID
    assert row.split()[:2] == [state, "1,200/1,640"]
    assert len(row) <= width


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_refused_job_says_why_within_the_width(width: int) -> None:
    _, name, *rest, why = lines(width, status="failed", errors=FAULTS)
    row = rest[0] if rest else name
    assert name.split()[0] == ID
    assert "failed" in row
    assert " 0" not in row, "of a job that was refused no request was counted"
    assert why.startswith("  line 3: No JSON: ?[2J")
    assert why.endswith("…; and 4 more")
    assert max(len(row), len(why)) <= width


def test_where_there_is_no_width_the_reason_is_whole() -> None:
    *_, why = lines(None, status="failed", errors=FAULTS)
    assert why.endswith("x (invalid_json); and 4 more")
