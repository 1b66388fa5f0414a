from pathlib import Path

import pyarrow as pa
import pytest

from jobs.dataset.input import input_errors, source
from tests.unit.dataset.reading import everything, read, written

RECORDS = [{"id": at, "text": f"row {at}", "lang": "de" if at % 2 else "en"} for at in range(5)]


def test_columns_come_in_their_order_and_then_those_that_are_needed() -> None:
    opened = source.open_source(RECORDS, columns=["text", "id"], needed=["lang", "id"])
    assert opened.schema.names == ["text", "id", "lang"]
    assert everything(opened)[1][0] == {"text": "row 0", "id": 0, "lang": "en"}


@pytest.mark.parametrize("choice", [{"columns": ["txt"]}, {"needed": ["txt"]}, {"sort_by": ["txt"]}])
def test_a_column_that_is_not_there_is_refused_with_those_that_are(choice: dict[str, list[str]]) -> None:
    said = r"no column 'txt'\. Did you mean 'text'\? The input has: id, text, lang"
    with pytest.raises(input_errors.ColumnMissing, match=said):
        source.open_source(RECORDS, **choice)  # type: ignore[arg-type]


def test_limit_counts_the_rows_that_pass_where() -> None:
    assert read(RECORDS, columns=["id"], where="lang = 'de'", limit=1) == ([1], [{"id": 1}], [])
    assert read(RECORDS, limit=0)[0] == []
    assert read(RECORDS, limit=99)[0] == [0, 1, 2, 3, 4]


def test_limit_stops_reading(tmp_path: Path) -> None:
    written(tmp_path / "1.csv", "a\n" + "x\n" * 3000)
    written(tmp_path / "2.csv", "a,b\n" + "bad\n" * 3000)
    numbers, _, faults = read(tmp_path, columns=["a"], limit=2500)
    assert len(numbers) == 2500
    assert not faults


def test_numbers_run_on_over_files_and_each_row_can_be_placed(tmp_path: Path) -> None:
    for name, rows in (("1", "a\nb\n"), ("2", ""), ("10", "\nc\nd,e\nf\n")):
        written(tmp_path / f"{name}.csv", "v\n" + rows)
    opened = source.open_source(tmp_path)
    assert opened.count() is None
    numbers, rows, faults = everything(opened)
    assert numbers == [0, 1, 2, 4]
    assert [row["v"] for row in rows] == ["a", "b", "c", "f"]
    assert [(fault.row, fault.where) for fault in faults] == [(3, f"{tmp_path}/10.csv line 4")]
    assert [opened.place(row) for row in (1, 2, 4)] == [
        f"{tmp_path}/1.csv line 3",
        f"{tmp_path}/10.csv line 3",
        f"{tmp_path}/10.csv line 5",
    ]
    assert opened.count() == 5


def test_every_pass_gives_the_same(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"a": 3}\nbad\n{"a": 1}\n')
    opened = source.open_source(path, where="a > 0", sort_by=["a"], scratch=tmp_path)
    first = everything(opened)
    next(opened.rows())
    assert everything(opened) == first == everything(source.open_source(path, where="a > 0", sort_by=["a"]))
    assert first[0] == [2, 0]
    assert [fault.row for fault in first[2]] == [1]


def test_identity_tells_that_a_file_changed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"a": 1}\n')
    before = source.open_source(path).identity()
    assert source.open_source(path).identity() == before
    written(path, '{"a": 12}\n')
    assert source.open_source(path).identity() != before


def test_files_of_json_lines_with_other_types_are_read_as_one(tmp_path: Path) -> None:
    written(tmp_path / "1.jsonl", '{"a": 1, "b": {"x": 1}, "c": 1}\n')
    written(tmp_path / "2.jsonl", '{"a": 1.5, "b": {"y": 2}, "c": [1]}\n')
    assert read(tmp_path)[1] == [
        {"a": 1.0, "b": {"x": 1, "y": None}, "c": "1"},
        {"a": 1.5, "b": {"x": None, "y": 2}, "c": "[1]"},
    ]


@pytest.mark.parametrize("rows", [[], pa.table({"a": pa.array([], pa.int64())}), [{}, {}]])
def test_an_input_without_rows_or_columns_is_refused(rows: object) -> None:
    with pytest.raises(input_errors.InputEmpty):
        source.open_source(rows)  # type: ignore[arg-type]


def test_what_is_no_input_is_refused() -> None:
    with pytest.raises(input_errors.InputError, match="int is no input"):
        source.open_source(7)  # type: ignore[arg-type]


def test_what_is_wrong_behind_the_last_row_that_is_wanted_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": 1}\nbad\n{"a": 2}\nbad\n{"a": 3}\nbad\n')
    for limit, wanted in ((1, []), (2, [1]), (3, [1, 3]), (9, [1, 3, 5])):
        found: list[source.Fault] = []
        for _ in source.open_source(path, limit=limit).rows(found.append):
            pass
        assert [fault.row for fault in found] == wanted


def test_a_missing_column_among_thousands_is_told_in_few_words() -> None:
    wide = pa.table({f"c{number}": [1] for number in range(3000)})
    with pytest.raises(input_errors.ColumnMissing, match=r"c99 and 2,900 more\.$") as caught:
        source.open_source(wide, columns=["c3000"])
    assert "'c300'" in str(caught.value)


def test_a_list_of_what_has_no_columns_is_refused_with_its_row() -> None:
    with pytest.raises(input_errors.InputError, match=r"^Row 1 of the list is no dict, but of type str"):
        source.open_source([{"a": 1}, "b"])  # type: ignore[list-item]
    with pytest.raises(input_errors.InputEmpty, match="no rows"):
        source.open_source([])
