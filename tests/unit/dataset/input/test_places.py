from pathlib import Path

import orjson
import pyarrow as pa
import pytest
from pyarrow import ipc

from jobs.dataset.input import input_errors, places, source
from tests.unit.dataset.reading import read, written

LINE = '{"id": 1}\n'


def found(place: object, top: Path) -> list[str]:
    return [str(Path(file.path).relative_to(top)) for file in places.find(str(place))]


def test_a_directory_is_read_to_the_bottom_in_natural_order(tmp_path: Path) -> None:
    for name in ("b/x.jsonl", "part-10.jsonl", "part-2.jsonl.gz", "a/part-1.ndjson"):
        written(tmp_path / name, LINE)
    assert found(tmp_path, tmp_path) == ["a/part-1.ndjson", "b/x.jsonl", "part-2.jsonl.gz", "part-10.jsonl"]
    assert found(f"{tmp_path}/", tmp_path) == found(tmp_path, tmp_path)


def test_what_is_no_data_in_a_directory_is_left_out(tmp_path: Path) -> None:
    others = (".cache/a.jsonl", ".a.jsonl", "_SUCCESS", "_delta/a.jsonl", "README.md", "LICENSE", "load.py")
    for name in ("a.jsonl", "dataset_infos.json", *others):
        written(tmp_path / name, LINE)
    assert found(tmp_path, tmp_path) == ["a.jsonl"]


def test_a_hidden_directory_that_is_named_is_read(tmp_path: Path) -> None:
    written(tmp_path / ".data" / "a.jsonl", LINE)
    assert found(tmp_path / ".data", tmp_path) == [".data/a.jsonl"]
    assert found(tmp_path / ".data" / "*.jsonl", tmp_path) == [".data/a.jsonl"]


def test_of_a_directory_that_generate_wrote_only_the_data_is_read(tmp_path: Path) -> None:
    for name in ("data-00000.jsonl", "data-00001.jsonl", "errors.parquet", "invalid.parquet", "README.md"):
        written(tmp_path / name, LINE)
    assert found(tmp_path, tmp_path) == ["data-00000.jsonl", "data-00001.jsonl"]


def test_a_file_that_is_called_errors_is_data_elsewhere(tmp_path: Path) -> None:
    written(tmp_path / "errors.jsonl", LINE)
    assert found(tmp_path, tmp_path) == ["errors.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.jsonl", ["a1.jsonl", "a2.jsonl"]),
        ("a[2-9].jsonl", ["a2.jsonl"]),
        ("?1.jsonl", ["a1.jsonl"]),
        ("**/*.jsonl", ["a1.jsonl", "a2.jsonl", "d/e/a4.jsonl", "d/a3.jsonl"]),
        ("*/*.jsonl", ["d/a3.jsonl"]),
        ("d/**", ["d/e/a4.jsonl", "d/a3.jsonl"]),
        ("d*", ["d/e/a4.jsonl", "d/a3.jsonl"]),
    ],
)
def test_a_glob_names_files_and_directories(tmp_path: Path, pattern: str, names: list[str]) -> None:
    for name in ("a1.jsonl", "a2.jsonl", "d/a3.jsonl", "d/e/a4.jsonl", "other.csv"):
        written(tmp_path / name, LINE)
    assert sorted(found(tmp_path / pattern, tmp_path)) == sorted(names)


def test_a_relative_glob_starts_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "d" / "a.jsonl", LINE)
    monkeypatch.chdir(tmp_path)
    for place in ("d", "d/*.jsonl", "*/a.jsonl", "**/*.jsonl", "./d/a.jsonl", "./*/a.jsonl", "."):
        assert len(read(place)[0]) == 1, place


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    written(tmp_path / "a[1].jsonl", LINE)
    assert found(tmp_path / "a[1].jsonl", tmp_path) == ["a[1].jsonl"]


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    written(tmp_path / "blobs" / "0123", LINE)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "a.jsonl").symlink_to("../blobs/0123")
    assert read(tmp_path / "snapshot")[1] == [{"id": 1}]


@pytest.mark.parametrize(
    ("files", "place", "kind", "said"),
    [
        (["a.jsonl", "b.csv"], "", input_errors.InputMixed, r"a\.jsonl.*b\.csv"),
        (["a.txt"], "", input_errors.InputEmpty, "no files of a known format"),
        ([], "", input_errors.InputEmpty, "no files of a known format"),
        (["a.jsonl"], "b.jsonl", input_errors.InputMissing, r"b\.jsonl does not exist"),
        (["a.jsonl"], "a.jsonl/b", input_errors.InputMissing, "does not exist"),
        (["a.jsonl"], "*.csv", input_errors.InputEmpty, r"\*\.csv"),
        (["a.jsonl"], "none/*.csv", input_errors.InputEmpty, r"\*\.csv"),
        (["a.xlsx"], "a.xlsx", input_errors.InputUnknown, r"a\.xlsx.*\.parquet.*\.csv.*\.jsonl"),
        (["a.parquet.gz"], "a.parquet.gz", input_errors.InputUnknown, r"parquet\.gz"),
        (["data"], "data", input_errors.InputUnknown, "no suffix that is known"),
    ],
)
def test_a_place_that_cannot_be_read_is_refused(
    tmp_path: Path, files: list[str], place: str, kind: type[Exception], said: str
) -> None:
    for name in files:
        written(tmp_path / name, LINE)
    with pytest.raises(kind, match=said):
        source.open_source(tmp_path / place)


def test_other_schemes_are_refused() -> None:
    with pytest.raises(input_errors.InputUnreadable, match="s3://"):
        source.open_source("https://example.com/a.csv")


def saved(path: Path, ids: list[int], **state: object) -> Path:
    """Write a dataset as Hugging Face's save_to_disk does."""
    path.mkdir(parents=True)
    names = [f"data-{at:05}-of-{len(ids):05}.arrow" for at in range(len(ids))]
    for name, value in zip(names, ids, strict=True):
        with ipc.new_stream(path / name, pa.schema([("id", pa.int64())])) as out:
            out.write_table(pa.table({"id": [value]}))
    files = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    written(path / "state.json", orjson.dumps(files | state))
    written(path / "dataset_info.json", b"{}")
    return path


def test_a_saved_hugging_face_dataset_is_read_in_its_own_order(tmp_path: Path) -> None:
    path = saved(tmp_path / "d", [7, 5, 6])
    assert read(path)[1] == [{"id": 7}, {"id": 5}, {"id": 6}]
    written(path / "cache-0123.arrow", b"left by a map")
    assert len(read(path)[1]) == 3


def test_of_a_dict_of_splits_one_has_to_be_named(tmp_path: Path) -> None:
    saved(tmp_path / "train", [1])
    saved(tmp_path / "test", [2])
    written(tmp_path / "dataset_dict.json", orjson.dumps({"splits": ["train", "test"]}))
    with pytest.raises(input_errors.SplitMissing, match=f"train, test.*{tmp_path}/train"):
        source.open_source(tmp_path)
    assert read(tmp_path / "test")[1] == [{"id": 2}]


def test_a_saved_dataset_that_lacks_a_file_or_has_an_index_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", [1, 2])
    (path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(input_errors.InputMissing, match="data-00001"):
        source.open_source(path)
    with pytest.raises(input_errors.InputUnreadable, match="flatten_indices"):
        source.open_source(saved(tmp_path / "b", [1], _indices_data_files=[{"filename": "i.arrow"}]))


def test_what_lies_in_the_output_is_no_input(tmp_path: Path) -> None:
    for name in ("a.jsonl", "out/data-00000.parquet", "out.longhaul/jobs/0/requests.jsonl", "output/b.jsonl"):
        written(tmp_path / name, LINE)
    outputs = [tmp_path / "out", tmp_path / "out.longhaul"]
    files = places.find(str(tmp_path), outputs)
    assert [Path(file.path).relative_to(tmp_path).as_posix() for file in files] == [
        "a.jsonl",
        "output/b.jsonl",
    ]
    for own in ("out", "out/data-00000.parquet", "out/*.parquet"):
        with pytest.raises(input_errors.InputIsOutput, match="another -o"):
            places.find(str(tmp_path / own), outputs)
