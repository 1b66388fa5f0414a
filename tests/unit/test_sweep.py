"""The sweep of a store in a directory."""

import io
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from jobs import finalize, ids, results
from jobs.files import Files
from jobs.records import JobRecord, PartEntry, ResultRow
from jobs.settings import Settings
from jobs.store import Object, ObjectStore
from jobs.store_local import LocalStore
from jobs.sweep import DAY, Sweep
from tests.sweep_contract import LATER, SweepContract, World


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path / "store")


class TestSweepOfLocalStore(SweepContract):
    pass


class WithoutDrafts(LocalStore):
    """A store of which a sweep with a clock that is ahead does not take what is being written."""

    def clean(self, before: float, dry_run: bool = False) -> Iterator[int]:
        yield from ()


class Swept:
    """A store in which a sweep of a day later runs before and after every call."""

    def __init__(self, inner: ObjectStore, scratch: Path) -> None:
        self._inner, self._scratch, self.sweeps = inner, scratch, 0

    def __getattr__(self, name: str) -> object:
        call = getattr(self._inner, name)
        if not callable(call):
            return call

        def swept(*args: object, **options: object) -> object:
            self._sweep()
            answer = call(*args, **options)
            self._sweep()
            return answer

        return swept

    def _sweep(self) -> None:
        self.sweeps += 1
        Sweep(self._inner, self._scratch, everything=True, clock=lambda: time.time() + LATER).run()


def test_a_sweep_at_any_step_of_finalizing_takes_nothing_of_the_job(tmp_path: Path) -> None:
    objects = WithoutDrafts(tmp_path / "store")
    world = World(objects)
    record = world.job("default")
    part = results.Part(record.id)
    part.add(_row(record, row) for row in range(3))
    part.write(objects)
    swept = cast(ObjectStore, Swept(objects, tmp_path))
    settings = Settings(scratch_dir=tmp_path)
    merge = finalize.Merge(record, "completed", swept, settings, f"jobs/{record.id}/out/1/")
    manifest = merge.run([PartEntry(part.name)], 3, "m", {"completed_at": time.time()})
    finalize.publish(swept, record, manifest)
    finalize.close(swept, record.id)
    assert swept.sweeps > 10  # type: ignore[attr-defined]
    for made in manifest.files.values():
        assert objects.size(made["key"]) == made["bytes"]
        assert Files(objects).get("default", made["id"]).bytes == made["bytes"]
    assert len(list(results.read_part(objects, record.id, PartEntry(part.name)))) == 3


def test_a_sweep_at_any_moment_of_an_upload_takes_nothing_of_it(objects: ObjectStore, tmp_path: Path) -> None:
    class Body(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            Sweep(objects, tmp_path).run()
            return super().read(size)

    swept = cast(ObjectStore, SweptNow(objects, tmp_path))
    record = Files(swept).add("default", "a", "batch", cast(BinaryIO, Body(b"x" * 3_000_000)), 3600)
    assert len(objects.get(record.key)) == record.bytes == 3_000_000


class SweptNow(Swept):
    """The same with the clock as it is."""

    def _sweep(self) -> None:
        Sweep(self._inner, self._scratch, everything=True).run()


def test_drafts_of_a_day_ago_go_and_are_counted(objects: ObjectStore, tmp_path: Path) -> None:
    objects.check()
    drafts = tmp_path / "store" / ".tmp"
    for name, age in (("old", DAY + 60), ("young", DAY - 60), ("lock", 2 * DAY)):
        (drafts / name).write_bytes(b"12345")
        os.utime(drafts / name, (time.time() - age,) * 2)
    for dry_run in (True, False):
        removed = Sweep(objects, tmp_path, dry_run=dry_run).run()
        assert (removed.objects, removed.bytes) == ({"drafts": 1}, {"drafts": 5})
    assert sorted(draft.name for draft in drafts.iterdir()) == ["lock", "young"]


def test_what_is_older_than_the_last_days_is_looked_at_when_everything_is(
    objects: ObjectStore, tmp_path: Path
) -> None:
    world = World(objects)
    world.end(world.job("default"))
    world.put("idempotency/default/1.json", left=True, data=b'{"job_id":"%s"}' % ids.batch_id().encode())
    for key in list(world.left):
        if key.startswith("ended/"):
            objects.delete(key)  # as after a day
            world.left.remove(key)

    def sweep(everything: bool) -> int:
        later = Sweep(objects, tmp_path, everything=everything, clock=lambda: time.time() + 30 * DAY)
        return later.run().objects.total()

    assert sweep(False) == 0
    assert sweep(True) == len(world.left)
    assert world.stored() == world.kept


class Many:
    """A store that lists many files and as many records, and holds none of them in memory."""

    url = "many://"

    def __init__(self, count: int) -> None:
        self._count = count

    def list(self, prefix: str) -> Iterator[Object]:
        for number in range(self._count if prefix in ("files/", "file-records/") else 0):
            name = f"file-{number:026}"
            yield Object(f"files/{name}" if prefix == "files/" else f"file-records/t/{name}.json", 1)

    def clean(self, before: float, dry_run: bool) -> Iterator[int]:
        yield from ()


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    pauses: list[None] = []
    tracemalloc.start()
    try:
        many = cast(ObjectStore, Many(40_000))
        removed = Sweep(many, tmp_path, pause=lambda: pauses.append(None)).run()
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert removed.objects.total() == 0
    assert len(pauses) == 400


def _row(record: JobRecord, row: int) -> ResultRow:
    line = results.line(ids.request_id(record.id, row), str(row), 200, {})
    return ResultRow(row, False, line, None)
