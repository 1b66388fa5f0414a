import gzip
import json
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from jobs.dataset.input import input_errors, source, text_lines
from tests.unit.dataset.reading import COMPRESS, read, written


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_every_compression_is_read(tmp_path: Path, suffix: str) -> None:
    data = lines({"id": 1}, {"id": 2}).encode()
    path = written(tmp_path / f"a.jsonl{suffix}", COMPRESS.get(suffix, bytes)(data))
    assert read(path) == ([0, 1], [{"id": 1}, {"id": 2}], [])


def test_gzip_files_that_were_put_together_are_read_to_the_end(tmp_path: Path) -> None:
    data = b"".join(gzip.compress(lines({"id": at}).encode()) for at in range(3))
    assert read(written(tmp_path / "a.jsonl.gz", data))[0] == [0, 1, 2]


def test_columns_are_the_union_of_all_lines_however_late_a_key_comes(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", lines(*({"a": at} for at in range(2500)), {"b": [1, 2]}))
    opened = source.open_source(path)
    assert opened.schema == pa.schema([("a", pa.int64()), ("b", pa.list_(pa.int64()))])
    assert opened.count() == 2501
    assert read(path)[1][-1] == {"a": None, "b": [1, 2]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ([1, "one", None, [1], {"k": 1}, True], ["1", "one", None, "[1]", '{"k":1}', "true"]),
        ([True, 1], ["true", "1"]),
        ([1.5, True], ["1.5", "true"]),
        ([[1.5], [True]], ["[1.5]", "[true]"]),
        ([{"a": 1.5}, {"a": True}], ['{"a":1.5}', '{"a":true}']),
        ([{"a": 1}, {"a": 1.5, "b": []}], [{"a": 1.0, "b": None}, {"a": 1.5, "b": []}]),
        ([{"a": 1}, {"a": "x"}], ['{"a":1}', '{"a":"x"}']),
        ([{}, {}], ["{}", "{}"]),
        ([{}, {"a": 1}], [{"a": None}, {"a": 1}]),
        ([[{}], []], ["[{}]", "[]"]),
        ([2**63, 1], [str(2**63), "1"]),
        ([2**60, 0.5], [float(2**60), 0.5]),
        ([{"a": 2**60}, {"a": 0.5}], None),
        ([None, None], [None, None]),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_values_of_several_types_become_one_type_that_loses_nothing(
    tmp_path: Path, values: list[object], expected: list[object] | None, apart: bool
) -> None:
    """Also when they are not in one batch."""
    fill: list[dict[str, object]] = [{"v": None}] * 1500 if apart else []
    records = [record for value in values for record in ({"v": value}, *fill)]
    _, rows, faults = read(written(tmp_path / "a.jsonl", lines(*records)))
    found = [row["v"] for row in rows][:: len(fill) + 1]
    assert not faults
    assert len(rows) == len(records)
    if expected is not None:
        assert found == expected


def test_a_struct_with_thousands_of_keys_is_text(tmp_path: Path) -> None:
    records = [{"m": {f"k{at}": 1}} for at in range(3000)]
    opened = source.open_source(written(tmp_path / "a.jsonl", lines(*records)))
    assert opened.schema.field("m").type == pa.string()


def test_a_deep_value_is_text_and_a_very_deep_one_a_fault(tmp_path: Path) -> None:
    deep = "[" * 190 + "1" + "]" * 190
    text = "".join(f'{{"m": {"[" * depth}{deep}{"]" * depth}}}\n' for depth in (0, 300, 800))
    _, rows, faults = read(written(tmp_path / "a.jsonl", text))
    assert rows == [{"m": deep}]
    assert [fault.row for fault in faults] == [1, 2]


def test_bad_lines_are_faults_with_their_line_and_the_others_go_on(tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf{"a": 1}\r\n\r\nnope\n   \n[1]\n{"a": 2}\n{"a": "\xff"}\n{"a": "\\ud800"}\n{"a": 3'
    path = written(tmp_path / "a.jsonl", text)
    numbers, rows, faults = read(path)
    assert numbers == [0, 3]
    assert rows == [{"a": 1}, {"a": 2}]
    assert [(fault.row, fault.where) for fault in faults] == [
        (row, f"{path} line {line}") for row, line in ((1, 3), (2, 5), (4, 7), (5, 8), (6, 9))
    ]
    assert "not JSON" in faults[0].message
    assert faults[1].message == "not a JSON object: [1]"
    opened = source.open_source(path)
    assert [opened.place(row) for row in (0, 3, 6)] == [f"{path} line {line}" for line in (1, 6, 9)]


def test_nan_and_infinity_are_numbers_as_python_wrote_them(tmp_path: Path) -> None:
    text = lines({"a": float("inf")}, {"a": float("nan")}, {"a": 1})
    _, rows, faults = read(written(tmp_path / "a.jsonl", text))
    assert not faults
    assert str([row["a"] for row in rows]) == "[inf, nan, 1.0]"
    _, _, faults = read(written(tmp_path / "b.jsonl", '{"a": NaN, "b": "\\ud800"}\n{"a": 1}\n'))
    assert [fault.row for fault in faults] == [0]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_breaks_off_gives_its_rows_and_one_fault(tmp_path: Path, suffix: str) -> None:
    records = ({"id": at, "n": at * at * 7919 % 1000003} for at in range(60_000))
    data = COMPRESS[suffix](lines(*records).encode())
    path = written(tmp_path / f"a.jsonl{suffix}", data[: len(data) * 3 // 4])
    numbers, rows, faults = read(path)
    assert numbers == [row["id"] for row in rows] == list(range(len(rows)))
    assert len(rows) > 5000
    (fault,) = faults
    assert fault.row == len(rows)
    assert fault.where == f"{path} line {len(rows) + 1}"
    assert "breaks off" in fault.message


def test_a_file_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", lines({"a": 1}))
    opened = source.open_source(path)
    path.unlink()
    with pytest.raises(input_errors.InputUnreadable, match=r"a\.jsonl"):
        list(opened.rows())


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_lines, "LONGEST", 1 << 20)
    text = lines(
        {"a": "x"}, {"a": "y" * (3 << 20)}, {"a": "z"}, {"a": "y" * (1 << 19)}, {"a": "y" * (2 << 20)}
    )
    numbers, _, faults = read(written(tmp_path / "a.jsonl", text))
    assert numbers == [0, 2, 3]
    assert [fault.row for fault in faults] == [1, 4]
    assert "more than 1 MiB" in faults[0].message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[\n {}]", "it is one JSON array"),
        (b"\xef\xbb\xbf [{}]", "it is one JSON array"),
        (b"nope\nnope\n", "no line of it is a JSON object; line 1: not JSON"),
        ('{"a": 1}'.encode("utf-16"), "it is UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    with pytest.raises(input_errors.InputUnreadable, match=said):
        source.open_source(written(tmp_path / "a.json", text))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_is_not_compressed_as_its_name_says_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(input_errors.InputUnreadable, match=r"a\.jsonl"):
        source.open_source(written(tmp_path / f"a.jsonl{suffix}", lines({"a": 1}) * 100))


def test_a_file_that_changed_after_it_was_opened_ends_the_run(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", lines({"a": 1}))
    opened = source.open_source(path)
    path.write_bytes(orjson.dumps({"a": {"b": 1}}))
    with pytest.raises(input_errors.InputChanged, match=r"a\.jsonl"):
        list(opened.rows())


def test_nested_values_stay_nested(tmp_path: Path) -> None:
    record = {"m": {"lang": "de", "tags": ["a", "b"]}, "turns": [{"role": "user", "content": "hi"}]}
    assert read(written(tmp_path / "a.jsonl", lines(record)))[1] == [record]


def test_nan_among_texts_is_null_and_not_the_word(tmp_path: Path) -> None:
    _, found, _ = read(written(tmp_path / "a.jsonl", '{"a": "x"}\n{"a": NaN}\n{"a": "null"}\n'))
    assert [row["a"] for row in found] == ["x", None, "null"]
