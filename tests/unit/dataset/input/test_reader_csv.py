from pathlib import Path

import pytest

from jobs.dataset.input import input_errors, reader_csv, source
from tests.unit.dataset.reading import COMPRESS, read, written


def test_every_value_stays_the_text_it_was(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "id,day,big,flag\n007,2024-01-02,12345678901234567890,true\n")
    assert read(path)[1] == [
        {"id": "007", "day": "2024-01-02", "big": "12345678901234567890", "flag": "true"}
    ]


def test_an_empty_field_is_null(tmp_path: Path) -> None:
    assert read(written(tmp_path / "a.csv", 'a,b\n,""\n"x",y'))[1] == [
        {"a": None, "b": None},
        {"a": "x", "b": "y"},
    ]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_compression_is_read(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path / f"a.tsv{suffix}", COMPRESS[suffix](b"a\tb\n1\t2,3\n"))
    assert read(path) == ([0], [{"a": "1", "b": "2,3"}], [])


def test_quoted_fields_may_have_commas_quotes_and_newlines(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b'\xef\xbb\xbfid,text\r\n1,"a, ""b""\r\nc"\r\n\r\n2,5" disk\r\n')
    opened = source.open_source(path)
    assert read(path) == ([0, 1], [{"id": "1", "text": 'a, "b"\r\nc'}, {"id": "2", "text": '5" disk'}], [])
    list(opened.rows())
    assert [opened.place(row) for row in (0, 1)] == [f"{path} line 2", f"{path} line 5"]
    assert opened.count() == 2


def test_bad_records_are_faults_with_their_line_and_the_others_go_on(tmp_path: Path) -> None:
    text = b'a,b\n1,2\n3\n4,5,6\n"x"y,7\n8,\xff\n9,10\n"open,\n11'
    path = written(tmp_path / "a.csv", text)
    numbers, rows, faults = read(path)
    assert numbers == [0, 5]
    assert rows == [{"a": "1", "b": "2"}, {"a": "9", "b": "10"}]
    assert [(fault.row, fault.where) for fault in faults] == [
        (row, f"{path} line {line}") for row, line in ((1, 3), (2, 4), (3, 5), (4, 6), (6, 8))
    ]
    assert faults[0].message == "it has 1 fields, the header has 2"
    assert "UTF-8" in faults[3].message


def test_a_quote_that_is_never_closed_does_not_fill_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_csv, "_LONGEST_FIELD", 10_000)
    path = written(tmp_path / "a.csv", 'a,b\n1,2\n3,"open\n' + "4,5\n" * 4000)
    numbers, _, faults = read(path)
    assert faults[0].row == 1
    assert "field limit" in faults[0].message
    assert len(numbers) > 1000


def test_a_file_that_breaks_off_gives_its_rows_and_one_fault(tmp_path: Path) -> None:
    data = COMPRESS[".gz"](b"a,b\n" + b"".join(b"%d,%d\n" % (at, at * 7919 % 65537) for at in range(100_000)))
    numbers, _, faults = read(written(tmp_path / "a.csv.gz", data[: len(data) // 2]))
    assert len(numbers) > 1000
    assert [fault.row for fault in faults] == [len(numbers)]


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("a,a\n1,2\n", input_errors.ColumnTwice, "'a'"),
        ("a,b\n", input_errors.InputEmpty, "no rows"),
        ("", input_errors.InputEmpty, "no columns"),
        ("a;b\n1;2\n", input_errors.InputUnreadable, "no comma, but semicolons"),
        ("a\tb\n1\t2\n", input_errors.InputUnreadable, r"no comma, but tabs; rename it to \.tsv"),
        (b"a,\xff\n1,2\n", input_errors.InputUnreadable, "line 1"),
    ],
)
def test_a_file_without_a_usable_header_or_rows_is_refused(
    tmp_path: Path, text: str | bytes, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        source.open_source(written(tmp_path / "a.csv", text))
