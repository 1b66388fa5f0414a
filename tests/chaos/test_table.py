"""The table of docs/faults.md says what the rounds cost."""

import sys
from pathlib import Path

import pytest

from tests.chaos import rounds, table


def test_rounds_become_a_line_for_each_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report, page = tmp_path / "report", tmp_path / "faults.md"
    monkeypatch.setenv(rounds.REPORT, str(report))
    for seconds in (1.0, 2.0, 6.5):
        rounds.record(rounds.Round("b is killed", 60, 0, 0, 4, seconds))
    rounds.record(rounds.Round("a is killed", 60, 1, 2, 0, 0.04))
    page.write_text(f"Text.\n\n{table.BEGIN}\n\nan old table\n")
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["table", str(report)])
    table.main()
    assert page.read_text().splitlines()[-2:] == [
        "| a is killed | 1 | 60 | 1 | 2 | 0 | 0.0 | 0.0 |",
        "| b is killed | 3 | 180 | 0 | 0 | 12 | 2.0 | 6.5 |",
    ]
    assert page.read_text().startswith(f"Text.\n\n{table.BEGIN}\n\n| fault |")
