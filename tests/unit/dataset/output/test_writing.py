import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from jobs.dataset.output import formats, shards, writing

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


def batch(first: int, last: int, text: str = "row") -> pa.RecordBatch:
    ids = list(range(first, last))
    return pa.record_batch({"id": ids, "text": [f"{text} {number}" for number in ids]}, schema=SCHEMA)


def random_rows(count: int) -> pa.RecordBatch:
    """Return rows of 10 KB that do not compress to less than half of it."""
    return pa.record_batch(
        {"id": range(count), "text": [os.urandom(5_000).hex() for _ in range(count)]}, SCHEMA
    )


def write(directory: Path, *batches: pa.RecordBatch, **options: Any) -> list[Path]:
    with writing.Writer(directory, SCHEMA, **options) as writer:
        for one in batches:
            writer.add(one)
        return writer.publish()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def ids(paths: list[Path]) -> list[int]:
    return [number for path in paths for number in parquet.read_table(path)["id"].to_pylist()]


@pytest.mark.parametrize("bounds", [[0, 10], [0, 3, 4, 10], range(11)])
def test_rows_keep_their_order_and_shards_their_most_rows_however_the_batches_are_cut(
    tmp_path: Path, bounds: Sequence[int]
) -> None:
    paths = write(tmp_path, *map(batch, bounds, bounds[1:]), shard_rows=4)
    assert names(tmp_path) == ["data-00000.parquet", "data-00001.parquet", "data-00002.parquet"]
    assert [parquet.read_metadata(path).num_rows for path in paths] == [4, 4, 2]
    assert ids(paths) == list(range(10))


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_shard_ends_soon_after_its_most_bytes(tmp_path: Path, format: str) -> None:
    paths = write(tmp_path, random_rows(400), format=format, shard_bytes=1 << 19)
    sizes = [path.stat().st_size for path in paths]
    assert len(sizes) > 2
    assert max(sizes) < 2.5 * (1 << 19)
    assert min(sizes[:-1]) >= 1 << 19


def test_row_groups_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "GROUP_BYTES", 100_000)
    wide = pa.record_batch({"id": range(1_000), "text": ["x" * 1_000] * 1_000}, SCHEMA)
    (path,) = write(tmp_path, wide)
    metadata = parquet.read_metadata(path)
    assert 10 <= metadata.num_row_groups <= 12
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_no_rows_are_one_shard_with_the_schema(tmp_path: Path) -> None:
    (path,) = write(tmp_path)
    assert parquet.read_schema(path).equals(SCHEMA)
    assert parquet.read_metadata(path).num_rows == 0
    (path,) = write(tmp_path, format="jsonl")
    assert path.read_bytes() == b""
    assert names(tmp_path) == ["data-00000.jsonl"]


def test_metadata_of_the_schema_is_kept(tmp_path: Path) -> None:
    schema = SCHEMA.with_metadata({"origin": "here"})
    with writing.Writer(tmp_path, schema) as writer:
        writer.add(batch(0, 1))
        (path,) = writer.publish()
    assert parquet.read_schema(path).metadata[b"origin"] == b"here"


def test_nothing_is_seen_before_publish_nor_left_by_abandon(tmp_path: Path) -> None:
    old = write(tmp_path, batch(0, 3))
    with writing.Writer(tmp_path, SCHEMA, shard_rows=1) as writer:
        writer.add(batch(5, 9))
        assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == old
    assert names(tmp_path) == ["data-00000.parquet"]
    assert ids(old) == [0, 1, 2]


def test_older_shards_of_the_name_are_replaced_in_any_format_and_others_stay(tmp_path: Path) -> None:
    write(tmp_path, batch(0, 9), shard_rows=2)
    write(tmp_path, batch(0, 1), name="errors", sharded=False)
    (tmp_path / "data-notes.parquet").write_text("mine")
    write(tmp_path, batch(0, 9), format="jsonl")
    assert names(tmp_path) == ["data-00000.jsonl", "data-notes.parquet", "errors.parquet"]


def test_a_single_file_without_rows_takes_the_older_one_away(tmp_path: Path) -> None:
    (path,) = write(tmp_path, batch(0, 5), name="errors", sharded=False, shard_rows=2)
    assert path.name == "errors.parquet"
    assert ids([path]) == list(range(5))
    assert write(tmp_path, name="errors", sharded=False) == []
    assert names(tmp_path) == []


def test_what_was_published_is_described(tmp_path: Path) -> None:
    with writing.Writer(tmp_path, SCHEMA, shard_rows=2) as writer:
        writer.add(batch(0, 3))
        paths = writer.publish()
    assert writer.rows == 3
    assert writer.files == tuple(
        shards.described(path, rows) for path, rows in zip(paths, (2, 1), strict=True)
    )
    assert writer.files[0].bytes == paths[0].stat().st_size


class Killed(BaseException):
    """Stands for a kill: no code of Longhaul handles it, so nothing is tidied up."""


class DiesAfter:
    """Lets `steps` changes of the file system happen, then dies at the next."""

    CALLS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")

    def __init__(self, steps: int, patch: pytest.MonkeyPatch) -> None:
        self._left = steps
        for name in self.CALLS:
            patch.setattr(os, name, partial(self._step, getattr(os, name)))

    def _step(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._left == 0:
            raise Killed
        self._left -= 1
        return call(*arguments, **named)


def killed(directory: Path, steps: int) -> bool:
    """Replace five shards by three, and die after some steps; tell whether that was before the end."""
    write(directory, batch(0, 5), shard_rows=1)
    with pytest.MonkeyPatch.context() as patch:
        DiesAfter(steps, patch)
        try:
            writer = writing.Writer(directory, SCHEMA, shard_rows=2)
            writer.add(batch(100, 105))
            writer.publish()
        except Killed:
            return True
    return False


def test_a_crash_at_any_step_leaves_old_or_new_shards_or_what_the_next_run_repairs(tmp_path: Path) -> None:
    old, new = list(range(5)), list(range(100, 105))
    repaired = []
    for steps in range(100):
        directory = tmp_path / str(steps)
        going_on = killed(directory, steps)
        left = ids(shards.present(directory))
        assert left in (old, new) or set(left) < set(old) or set(left) < set(new), steps
        shards.repair(directory)
        repaired.append(ids(shards.present(directory)))
        writing.Writer(directory, SCHEMA).abandon()
        assert names(directory) == [path.name for path in shards.present(directory)], steps
        if not going_on:
            break
    first = repaired.index(new)
    assert repaired == [old] * first + [new] * (len(repaired) - first)
    assert first > 5
    assert len(repaired) - first > 10


ON_THE_WAY = 12
"""Steps after which the new shards are finished and not yet in the place of the old ones."""


def test_a_repair_that_is_killed_as_well_is_repaired(tmp_path: Path) -> None:
    for steps in range(100):
        killed(tmp_path / str(steps), ON_THE_WAY)
        assert names(tmp_path / str(steps))[0] == ".data.ready"
        with pytest.MonkeyPatch.context() as patch:
            DiesAfter(steps, patch)
            try:
                shards.repair(tmp_path / str(steps))
                break
            except Killed:
                pass
        shards.repair(tmp_path / str(steps))
        assert ids(shards.present(tmp_path / str(steps))) == list(range(100, 105)), steps
    assert steps > 5


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(writing.CannotWrite, match="file/out"):
        writing.Writer(tmp_path / "file" / "out", SCHEMA)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_disk_that_takes_no_more_is_told_and_the_old_shards_stay(tmp_path: Path, format: str) -> None:
    old = write(tmp_path, batch(0, 3))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(writing.CannotWrite, match=r"too large.*-o"):
            write(tmp_path, random_rows(100), format=format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == old


def test_rows_of_another_schema_are_refused(tmp_path: Path) -> None:
    with writing.Writer(tmp_path, SCHEMA) as writer, pytest.raises(ValueError, match="columns"):
        writer.add(pa.record_batch({"id": [1]}))


@pytest.mark.long
def test_memory_is_flat_in_the_rows(tmp_path: Path) -> None:
    def peak(batches: int) -> int:
        script = (
            f"import resource, sys; from pathlib import Path; from {__name__} import *\n"
            "with writing.Writer(Path(sys.argv[1]), SCHEMA) as writer:\n"
            f"    for n in range({batches}):\n"
            "        writer.add(batch(n * 1000, n * 1000 + 1000, 'x' * 500))\n"
            "    writer.publish()\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        command = [sys.executable, "-c", script, str(tmp_path / str(batches))]
        return int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)

    assert peak(600) < 1.2 * peak(120)
