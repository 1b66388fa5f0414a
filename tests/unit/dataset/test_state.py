"""What a directory remembers, on a real SQLite."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.dataset import state

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
OUTPUTS = st.builds(
    state.Output,
    text=st.none() | TEXT,
    finish_reason=st.none() | TEXT,
    prompt_tokens=st.integers(0, 2**31),
    latency_seconds=st.none() | st.floats(0, 1e6),
    attempt=st.integers(0, 100),
    valid=st.booleans(),
    error=st.none() | st.tuples(TEXT, TEXT),
)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "state.sqlite"


@pytest.fixture
def known(path: Path) -> Iterator[state.State]:
    with state.State(path) as made:
        yield made


@given(OUTPUTS)
def test_an_output_is_the_same_after_it_was_written_down(output: state.Output) -> None:
    assert state.Output.from_json(output.to_json()) == output


def test_outputs_and_wishes_survive_reopening(path: Path) -> None:
    with state.State(path) as first:
        first.keep((key(n), state.Output(f"é {n}")) for n in range(3))
        first.want([(2**40, 1, key(1))])
        first.fault([(7, 0, "no text")])
        assert first.times_seen([b"p"]) == [0]
    with state.State(path) as again:
        assert again.find([key(2), key(9)]) == {key(2): state.Output("é 2")}
        assert again.wanted(0, 2**41) == {(2**40, 1): (key(1), None), (7, 0): (None, "no text")}
        assert again.times_seen([b"p"]) == [1]


def test_more_keys_than_sqlite_takes_in_one_question_are_found(known: state.State) -> None:
    known.keep((key(n), state.Output(str(n))) for n in range(1, 40_001))
    found = known.find({key(n) for n in range(1, 40_001)})
    assert len(found) == 40_000
    assert found[key(33_333)].text == "33333"


def test_the_later_of_two_outputs_of_a_key_stays(known: state.State) -> None:
    known.keep([(key(1), state.Output(None, error=("lost", "worker"))), (key(1), state.Output("a"))])
    known.keep([(key(1), state.Output("b"))])
    assert known.find([key(1)]) == {key(1): state.Output("b")}
    known.begin()
    assert known.find([key(1)]), "what succeeded later counts as failed"


def test_all_outputs_are_kept_or_none(known: state.State) -> None:
    def broken() -> Iterator[tuple[bytes, state.Output]]:
        yield key(1), state.Output("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        known.keep(broken())
    assert known.find([key(1)]) == {}
    known.keep([(key(2), state.Output("b"))])
    assert known.find([key(2)])


def test_a_new_pass_forgets_what_failed_and_what_rows_wanted_and_keeps_the_rest(known: state.State) -> None:
    known.keep(
        [
            (key(1), state.Output("good")),
            (key(2), state.Output(None, error=("lost", "worker"))),
            (key(3), state.Output("not json", valid=False, error=("invalid_output", "x"))),
        ]
    )
    known.want([(0, 0, key(1))])
    assert known.times_seen([b"p", b"p"]) == [0, 1]
    known.begin(is_first=False)
    assert known.find(map(key, range(4))).keys() == {key(1), key(3)}
    assert known.wanted(0, 10) == {}
    assert known.times_seen([b"p"]) == [2]
    known.begin()
    assert known.times_seen([b"p"]) == [0]


def test_a_row_that_is_asked_for_again_has_its_latest_wish_only(known: state.State) -> None:
    known.fault([(1, 0, "broken")])
    known.want([(1, 0, key(1))])
    assert known.wanted(1, 1) == {(1, 0): (key(1), None)}
    known.fault([(1, 0, "broken")])
    assert known.wanted(1, 1) == {(1, 0): (None, "broken")}


def test_wishes_of_the_rows_asked_for_and_no_others_come_back(known: state.State) -> None:
    known.want((row, sample, key(row)) for row in range(10) for sample in range(2))
    found = known.wanted(3, 4)
    assert sorted(found) == [(3, 0), (3, 1), (4, 0), (4, 1)]


def test_equal_prompts_are_counted_over_batches(known: state.State) -> None:
    assert known.times_seen([b"a", b"b", b"a"]) == [0, 0, 1]
    assert known.times_seen([b"a", b"b"]) == [2, 1]


def test_two_runs_can_fill_one_file_at_once(path: Path) -> None:
    with state.Outputs(path) as one, state.Outputs(path) as other:
        one.keep([(key(1), state.Output("a"))])
        other.keep([(key(2), state.Output("b"))])
        assert one.find([key(1), key(2)]).keys() == {key(1), key(2)}


@pytest.mark.parametrize("damage", [b"no database " * 500, b"SQLite format 3\0" + b"\xff" * 8000])
def test_a_damaged_file_is_named_with_what_to_do(path: Path, damage: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(damage)
    with pytest.raises(state.StateDamaged, match=r"state\.sqlite.*Remove it"):
        state.State(path)


def test_damage_that_shows_later_is_told_in_the_same_way(path: Path) -> None:
    with state.State(path) as made:
        made.keep((key(n), state.Output("x" * 3000)) for n in range(300))
    with path.open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"\xff" * 200_000)

    def used() -> None:
        with state.State(path) as again:
            again.begin()
            again.find(map(key, range(300)))

    with pytest.raises(state.StateDamaged):
        used()


def test_a_full_disk_is_not_taken_for_damage_and_loses_nothing(known: state.State) -> None:
    known.keep([(key(1), state.Output("a"))])
    (pages,) = known._db.execute("PRAGMA page_count").fetchone()
    known._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(state.StateUnusable, match="full") as caught:
        known.keep((key(n), state.Output("x" * 3000)) for n in range(2, 300))
    assert not isinstance(caught.value, state.StateDamaged)
    known._db.execute("PRAGMA max_page_count = 100000")
    assert known.find(map(key, range(300))).keys() == {key(1)}
    known.keep([(key(2), state.Output("b"))])


def test_a_file_that_somebody_holds_is_not_taken_for_damage(known: state.State, path: Path) -> None:
    known._db.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(state.StateUnusable, match="locked") as caught:
        known.want([(0, 0, key(1))])
    other.close()
    assert not isinstance(caught.value, state.StateDamaged)


@pytest.mark.parametrize("value", [b"\x00", b"{}", b"[]", b'{"text": "a", "error": null, "unknown": 1}'])
def test_an_output_that_is_none_is_told_as_damage(known: state.State, value: bytes) -> None:
    known._db.execute("INSERT INTO outputs (key, failed, value) VALUES (?, 0, ?)", (key(1), value))
    with pytest.raises(state.StateDamaged, match="Remove it"):
        known.find([key(1)])
