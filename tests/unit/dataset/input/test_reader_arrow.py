from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from jobs.dataset.input import input_errors, source
from tests.unit.dataset.reading import everything, read, written

RECORDS = [{"id": at, "m": {"lang": "de", "n": [at]}, "t": f"row {at}"} for at in range(2500)]
TABLE = pa.Table.from_pylist(RECORDS)


def stream(path: Path, table: pa.Table, kind: str = "stream") -> Path:
    make = ipc.new_stream if kind == "stream" else ipc.new_file
    with make(path, table.schema) as out:
        out.write_table(table)
    return path


def parquet_file(path: Path, table: pa.Table, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, **options)
    return path


@pytest.mark.parametrize("kind", ["parquet", "stream", "file", "table", "reader"])
def test_rows_come_in_small_batches_with_their_numbers(tmp_path: Path, kind: str) -> None:
    places = {
        "parquet": lambda: parquet_file(tmp_path / "a.parquet", TABLE),
        "stream": lambda: stream(tmp_path / "a.arrow", TABLE),
        "file": lambda: stream(tmp_path / "a.arrow", TABLE, "file"),
        "table": lambda: TABLE,
        "reader": lambda: TABLE.to_reader(),
    }
    opened = source.open_source(places[kind](), scratch=tmp_path)
    assert opened.count() == 2500
    assert max(each.batch.num_rows for each in opened.rows()) <= 1000
    for _ in range(2):
        assert everything(opened) == (list(range(2500)), RECORDS, [])


def test_large_rows_come_in_small_batches(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 100_000 + str(at) for at in range(300)]})
    path = parquet_file(tmp_path / "a.parquet", table, use_dictionary=False)
    batches = [each.batch for each in source.open_source(path).rows()]
    assert max(batch.nbytes for batch in batches) < 5 << 20
    assert pa.Table.from_batches(batches) == table


def test_a_reader_leaves_nothing_behind(tmp_path: Path) -> None:
    opened = source.open_source(TABLE.to_reader(), scratch=tmp_path)
    assert list(tmp_path.iterdir())
    del opened
    assert not list(tmp_path.iterdir())


def test_dictionaries_are_read_as_their_values(tmp_path: Path) -> None:
    table = pa.table({"lang": pa.array(["de", "en", "de"]).dictionary_encode()})
    opened = source.open_source(parquet_file(tmp_path / "a.parquet", table))
    assert opened.schema.field("lang").type == pa.string()
    assert everything(opened)[1] == [{"lang": "de"}, {"lang": "en"}, {"lang": "de"}]


def test_a_column_with_a_dot_is_not_a_field_of_a_struct(tmp_path: Path) -> None:
    table = pa.table({"m.lang": ["dot"], "m": [{"lang": "field"}]})
    path = parquet_file(tmp_path / "a.parquet", table)
    assert read(path, columns=["m.lang"])[1] == [{"m.lang": "dot"}]
    assert read(path, columns=["m"])[1] == [{"m": {"lang": "field"}}]


def test_files_with_other_columns_and_wider_types_are_read_as_one(tmp_path: Path) -> None:
    parquet_file(tmp_path / "1.parquet", pa.table({"a": pa.array([1], pa.int32()), "s": [{"x": 1}]}))
    parquet_file(tmp_path / "2.parquet", pa.table({"b": ["x"], "a": [2.5]}))
    parquet_file(tmp_path / "3.parquet", pa.table({"s": [{"x": 2, "y": "z"}], "a": pa.nulls(1)}))
    assert read(tmp_path) == (
        [0, 1, 2],
        [
            {"a": 1.0, "s": {"x": 1, "y": None}, "b": None},
            {"a": 2.5, "s": None, "b": "x"},
            {"a": None, "s": {"x": 2, "y": "z"}, "b": None},
        ],
        [],
    )


def test_types_that_have_nothing_in_common_are_refused_with_both_files(tmp_path: Path) -> None:
    parquet_file(tmp_path / "1.parquet", pa.table({"a": [1]}))
    parquet_file(tmp_path / "2.parquet", pa.table({"a": ["x"]}))
    with pytest.raises(input_errors.TypesDiffer, match=r"'a'.*1\.parquet.*2\.parquet.*int64 vs string"):
        source.open_source(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize(
    "data", [b"", b"id\n1\n2\n", b"PAR1" + b"\0" * 100 + b"PAR1", b"ARROW1" + b"\0" * 100]
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    with pytest.raises(input_errors.InputError, match=name.replace(".", r"\.")):
        source.open_source(written(tmp_path / name, data))


def test_a_parquet_file_that_is_a_pointer_of_git_lfs_is_refused(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(input_errors.InputUnreadable, match="git lfs pull"):
        source.open_source(path)


def test_a_damaged_page_ends_the_run_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = parquet_file(tmp_path / "a.parquet", TABLE, compression="zstd")
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
    opened = source.open_source(path)
    with pytest.raises(input_errors.InputUnreadable, match=r"a\.parquet"):
        list(opened.rows())


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(input_errors.ColumnTwice, match="'a'"):
        source.open_source(parquet_file(tmp_path / "a.parquet", table))


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["b", "a", None], pa.string_view()),
        pa.array([["b"], ["a"], None], pa.list_(pa.string_view())),
        pa.array([{"v": "b"}, {"v": "a"}, None], pa.struct([("v", pa.string_view())])),
        pa.array(["b", "a", None]).dictionary_encode(),
        pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), pa.array(["b", "a", None])),
        pa.array(["b", "a", None], pa.large_string()),
        pa.array([2**64 - 1, 0, None], pa.uint64()),
        pa.array([1.5, 0.5, None], pa.float16()),
    ],
    ids=lambda column: str(column.type),
)
def test_rows_with_unusual_types_can_be_filtered_and_sorted(column: pa.Array) -> None:
    table = pa.table({"v": column, "id": [1, 2, 3]})
    assert read(table, sort_by=["v"], where="id > 0") == (
        [1, 0, 2],
        [{"v": column.to_pylist()[at], "id": at + 1} for at in (1, 0, 2)],
        [],
    )


def test_a_file_without_any_of_the_columns_still_has_its_rows(tmp_path: Path) -> None:
    parquet_file(tmp_path / "1.parquet", pa.table({"a": [1, 2]}))
    parquet_file(tmp_path / "2.parquet", pa.table({"b": ["x"]}))
    assert read(tmp_path, columns=["b"]) == ([0, 1, 2], [{"b": None}, {"b": None}, {"b": "x"}], [])
