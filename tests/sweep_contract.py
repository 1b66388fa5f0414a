"""What a sweep removes from any store: tests to derive from; a fixture `objects` gives an empty store."""

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs import deletion, errors, finalize, ids, results
from jobs.files import made_at, record_key, write_record
from jobs.records import NO_USAGE, FileRecord, JobRecord, Manifest
from jobs.store import ObjectStore
from jobs.store_faults import FailAfter, FaultyStore
from jobs.sweep import DAY, HOUR, Sweep

TENANTS = ("default", "other")
LATER = 1.5 * DAY
"""How much later the sweep comes: what is made now is old then, and still looked at."""


class World:
    """Makes jobs and files in a store; `kept` and `left` are the keys that a sweep must keep and remove."""

    def __init__(self, objects: ObjectStore, seed: int = 0) -> None:
        self.objects, self.random = objects, random.Random(seed)
        self.kept: set[str] = set()
        self.left: set[str] = set()

    def stored(self) -> set[str]:
        return {found.key for found in self.objects.list("")}

    def put(self, key: str, left: bool = False, data: bytes = b"x") -> str:
        self.objects.put(key, data)
        (self.left if left else self.kept).add(key)
        return key

    def file(self, tenant: str, expires_at: int | None = None, gone: bool = False) -> str:
        """Upload a file; `gone`: its record and bytes are to be removed."""
        file_id = ids.file_id()
        self._record(tenant, file_id, self.put(f"files/{file_id}", gone), expires_at, gone)
        return file_id

    def _record(self, tenant: str, file_id: str, key: str, expires_at: int | None, gone: bool) -> None:
        record = FileRecord(file_id, tenant, "a", "batch", 1, int(made_at(file_id)), key, expires_at)
        write_record(self.objects, record)
        names = {record_key(tenant, file_id)}
        if expires_at is not None:
            names.add(f"expiring/{tenant}/{file_id}@{expires_at}")
        (self.left if gone else self.kept).update(names)

    def job(self, tenant: str, output_expires: int | None = None, keyed: bool = False) -> JobRecord:
        """Accept a job, with an input file of its own."""
        job_id, file_id = ids.batch_id(), self.file(tenant)
        record = JobRecord(
            job_id,
            tenant,
            "/v1/completions",
            file_id,
            f"files/{file_id}",
            "24h",
            time.time(),
            time.time() + DAY,
            output_expires_seconds=output_expires,
            idempotency=f"idempotency/{tenant}/{ids.ulid()}.json" if keyed else None,
        )
        self.put(f"jobs/{job_id}/job.json", data=record.to_json())
        self.put(f"job-index/{tenant}/{job_id}", data=b"")
        self.put(f"open/{job_id}", data=b"")
        if record.idempotency:
            self.put(record.idempotency, data=b'{"job_id":"%s","request_sha256":""}' % job_id.encode())
        return record

    def work(self, record: JobRecord, left: bool = False) -> list[str]:
        """Plan and run some of a job; return the names of its parts."""
        epoch = self.random.randrange(1, 10**6)
        for shard in range(self.random.randrange(3)):
            self.put(f"jobs/{record.id}/plan/{epoch}/{shard:06}.jsonl", left)
        parts = [ids.ulid() for _ in range(self.random.randrange(1, 4))]
        for part in parts:
            self.put(results.part_key(record.id, part), left)
        return parts

    def end(self, record: JobRecord, state: str = "completed", expired: bool = False) -> Manifest:
        """End a job: its files lie there, and leftovers of finalizers that came second."""
        parts = [] if state == "failed" else self.work(record)
        kinds = () if state == "failed" else deletion.RESULT_KINDS[self.random.randrange(2) :]
        plans = {key for key in self.kept if key.startswith(f"jobs/{record.id}/plan/")}
        self.kept -= plans
        self.left |= plans
        self.zombie(record)
        files = {}
        for kind in kinds:
            key = self.put(f"jobs/{record.id}/out/7/{kind}.jsonl", expired)
            files[kind] = {"id": ids.result_file_id(record.id, kind), "key": key, "bytes": 1}
        manifest = Manifest(
            record.id,
            state,
            "m",
            {"completed_at": time.time()},
            1,
            1,
            0,
            NO_USAGE,
            files,
            parts=[{"name": name, "skip": []} for name in parts],
        )
        before = self.stored()
        finalize.publish(self.objects, record, manifest)
        finalize.close(self.objects, record.id)
        self.kept.discard(f"open/{record.id}")
        made = self.stored() - before
        self.left.add(f"ended/{record.id}")
        if expired:
            self.left |= {key for key in self.kept if key.startswith(f"jobs/{record.id}/parts/")}
            self.left |= {key for key in made if key.startswith(("file-records/", "expiring/"))}
        self.kept = (self.kept | made) - self.left
        return manifest

    def zombie(self, record: JobRecord) -> None:
        """Write as processes do that lost their leases long ago."""
        self.work(record, left=True)
        for kind in ("output", "summary"):
            self.put(f"jobs/{record.id}/out/{self.random.randrange(10**6, 10**7)}/{kind}.jsonl", left=True)

    def gone(self, record: JobRecord) -> None:
        """Expect everything of a job to go, its input file excepted."""
        made = {key for key in self.kept if record.id.removeprefix("batch_") in key}
        made |= {record.idempotency} if record.idempotency else set()
        self.kept -= made
        self.left |= made


class SweepContract:
    @pytest.fixture
    def world(self, objects: ObjectStore) -> World:
        return World(objects)

    @pytest.fixture(autouse=True)
    def _scratch(self, tmp_path: Path) -> None:
        self.scratch = tmp_path

    def sweep(self, world: World, later: float = LATER, **options: bool) -> dict[str, int]:
        """Sweep so much later; return how many objects of each kind went."""
        clock = lambda: time.time() + later  # noqa: E731
        return dict(Sweep(world.objects, self.scratch, clock=clock, **options).run().objects)

    def exactly(self, world: World, later: float = LATER) -> None:
        """Fail unless a sweep removes what is left, nothing else, and the next one nothing more."""
        before = world.stored()
        assert world.kept | world.left == before
        for everything in (False, True):
            foreseen = self.sweep(world, later, everything=everything, dry_run=True)
            assert sum(foreseen.values()) == len(world.left), foreseen
        assert world.stored() == before
        removed = self.sweep(world, later)
        assert world.stored() == world.kept
        assert removed == foreseen
        assert self.sweep(world, later) == {}
        assert self.sweep(world, later, everything=True) == {}
        assert world.stored() == world.kept

    @pytest.mark.parametrize("seed", range(3))
    def test_exactly_the_leftovers_go(self, objects: ObjectStore, seed: int) -> None:
        world = World(objects, seed)
        soon = int(time.time() + HOUR)
        for _ in range(8):
            self.any_job(world)
        for tenant in TENANTS:
            world.file(tenant)
            world.file(tenant, int(time.time() + 30 * DAY))
            world.file(tenant, soon, gone=True)
            world.put(f"files/{ids.file_id()}", left=True)
            world.put(
                f"idempotency/{tenant}/{ids.ulid()}.json", left=True, data=b'{"job_id":"%s"}' % _new_id()
            )
        for key in ("other/x", "files/readme.txt", "jobs/notes.txt", "jobs/x/y", "ended/x", "keys/1.json"):
            world.put(key)
        self.exactly(world)

    def any_job(self, world: World) -> None:
        record = world.job(
            world.random.choice(TENANTS),
            world.random.choice([None, 30 * 86_400]),
            world.random.random() < 0.5,
        )
        state = world.random.choice(
            ["open", "running", "completed", "failed", "cancelled", "expired", "gone"]
        )
        if state == "running":
            world.work(record)
        elif state == "gone":
            self.half_deleted(world, record, world.random.randrange(12))
        elif state != "open":
            world.end(record, state)

    def half_deleted(self, world: World, record: JobRecord, steps: int) -> None:
        """Delete an ended job, and break off after some steps."""
        world.end(record)
        deletion.begin(world.objects, record)
        world.put(f"deleted/{record.id}", left=True, data=record.to_json())
        breaking = FaultyStore(world.objects, {"delete": FailAfter(steps)})
        world.gone(record)
        with pytest.raises(errors.StoreUnreachable):
            deletion.purge(breaking, record)
        world.left &= world.stored()

    @pytest.mark.parametrize("steps", range(0, 14, 2))
    def test_a_deletion_that_broke_off_is_finished(self, world: World, steps: int) -> None:
        self.half_deleted(world, world.job("default", 30 * 86_400, keyed=True), steps)
        self.exactly(world)

    def test_what_is_written_after_a_deletion_goes_for_a_day(self, world: World) -> None:
        record = world.job("default")
        manifest = world.end(record)
        deletion.begin(world.objects, record)
        deletion.purge(world.objects, record)
        finalize.publish(world.objects, record, manifest)  # a finalizer that had hung before its last step
        world.objects.put(results.part_key(record.id, ids.ulid()), b"x")
        self.sweep(world, 0.5 * HOUR)
        assert world.stored() == {
            f"deleted/{record.id}",
            record.input_key,
            record_key("default", record.input_file_id),
        }

    def test_an_hour_after_the_end_nothing_goes(self, world: World) -> None:
        for state in ("completed", "failed", "cancelled", "expired"):
            world.end(world.job("default", 3600), state)
        world.put(f"files/{ids.file_id()}")
        world.put("idempotency/default/1.json", data=b'{"job_id":"%s"}' % _new_id())
        before = world.stored()
        assert self.sweep(world, 0.9 * HOUR, everything=True) == {}
        assert world.stored() == before

    def test_a_job_that_is_open_loses_nothing_though_its_manifest_is_there(self, world: World) -> None:
        record = world.job("default")
        world.end(record)
        world.put(f"open/{record.id}")  # its finalizer died before the last step
        world.kept |= world.left - {f"ended/{record.id}"}
        world.left &= {f"ended/{record.id}"}
        self.exactly(world)

    def test_results_that_expired_go_with_the_parts_and_the_batch_stays(self, world: World) -> None:
        record = world.job("default", 3600)
        world.end(record, expired=True)
        self.exactly(world)
        assert {f"jobs/{record.id}/job.json", f"jobs/{record.id}/manifest.json"} <= world.stored()

    def test_the_bytes_of_an_expired_input_stay_while_a_job_is_open(self, world: World) -> None:
        record = world.job("default")
        due = int(time.time() + HOUR)
        world._record("default", record.input_file_id, record.input_key, due, gone=True)
        world.kept.discard(record_key("default", record.input_file_id))
        self.exactly(world)
        assert record.input_key in world.stored()
        world.end(record)
        self.sweep(world)
        assert record.input_key not in world.stored()

    def test_the_bytes_of_a_deleted_input_stay_while_a_job_is_open(self, world: World) -> None:
        record = world.job("default")
        world.objects.delete(record_key("default", record.input_file_id))
        world.kept.discard(record_key("default", record.input_file_id))
        self.exactly(world)

    def test_an_upload_in_progress_stays(self, world: World) -> None:
        """Its bytes are there before its record; the id tells that it is young."""
        young = f"file-{_ulid_at(time.time() + LATER - 60)}"
        world.put(f"files/{young}")
        self.exactly(world)

    def test_two_sweeps_at_once_remove_the_same(self, world: World) -> None:
        for _ in range(5):
            world.end(world.job("default"))
            world.file("default", int(time.time()), gone=True)
        with ThreadPoolExecutor(2) as pool:
            barrier = threading.Barrier(2)

            def one(_: int) -> None:
                barrier.wait()
                self.sweep(world)

            list(pool.map(one, range(2)))
        assert world.stored() == world.kept

    def test_a_sweep_that_breaks_off_is_finished_by_the_next(self, world: World, tmp_path: Path) -> None:
        for _ in range(2):
            world.end(world.job("default", 3600), expired=True)
        world.file("default", int(time.time()), gone=True)
        world.put(f"files/{ids.file_id()}", left=True)
        for _ in world.left:  # one object more each time
            breaking = FaultyStore(world.objects, {"delete": FailAfter(1)})
            with contextlib.suppress(errors.StoreUnreachable):
                Sweep(breaking, tmp_path, clock=lambda: time.time() + LATER).run()
        assert self.sweep(world) == {}
        assert world.stored() == world.kept


def _new_id() -> bytes:
    return ids.batch_id().encode()


def _ulid_at(moment: float) -> str:
    alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
    number = int(moment * 1000) << 80
    return "".join(alphabet[number >> shift & 31] for shift in range(125, -1, -5))
