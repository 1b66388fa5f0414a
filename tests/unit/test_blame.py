"""Who ran when a run died is known to the next one."""

from pathlib import Path

import pytest

from worker.blame import Blame


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "running.json"


def test_who_ran_is_a_suspect_unless_it_has_its_result(path: Path) -> None:
    Blame(path, ()).admit(["j:1", "j:2"], ["j:3"])
    assert Blame(path, {2}).suspects == {"j:1", "j:3"}


def test_two_deaths_alone_make_guilty_and_one_among_others_does_not(path: Path) -> None:
    Blame(path, ()).admit(["j:1", "j:2"], [])
    for deaths in range(2):
        blame = Blame(path, ())
        assert not blame.is_guilty("j:1"), deaths
        blame.alone = True
        blame.admit(["j:1"], [])
    blame = Blame(path, ())
    assert blame.is_guilty("j:1")
    assert not blame.is_guilty("j:2")


def test_a_death_counts_once_however_often_the_next_run_dies_before_it_runs(path: Path) -> None:
    blame = Blame(path, ())
    blame.alone = True
    blame.admit(["j:1"], [])
    for _ in range(3):
        assert not Blame(path, ()).is_guilty("j:1")


def test_an_end_in_good_order_leaves_no_suspects(path: Path) -> None:
    blame = Blame(path, ())
    blame.admit(["j:1"], [])
    blame.acquit()
    assert not path.exists()
    assert not Blame(path, ()).suspects
