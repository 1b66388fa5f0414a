"""What every ObjectStore does: a class of tests to derive from; a fixture `objects` gives the store."""

import io
import random
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, cast

import pytest

from jobs import errors
from jobs.store import Object, ObjectStore

MEGABYTE = 1 << 20
BAD_KEYS = [
    "",
    "/etc/passwd",
    "../up",
    "a/../../up",
    "a/..",
    "a//b",
    "a/",
    ".tmp/x",
    "a/.",
    "a\0b",
    "a b",
    "ä",
]


class Zeros(io.RawIOBase):
    """A file of `size` zero bytes that is never in memory as a whole; breaks after `breaks_at`."""

    def __init__(self, size: int, breaks_at: int | None = None) -> None:
        self._left, self._breaks_at, self._given = size, breaks_at, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        if self._breaks_at is not None and self._given >= self._breaks_at:
            raise ConnectionResetError("the client went away")
        size = min(len(buffer), self._left)
        buffer[:size] = bytes(size)
        self._left -= size
        self._given += size
        return size


class StoreContract:
    def test_put_then_get_returns_the_bytes(self, objects: ObjectStore) -> None:
        data = bytes(range(256)) * 5
        assert objects.put("files/a", data) == len(data)
        assert objects.get("files/a") == data
        assert objects.size("files/a") == len(data)

    def test_put_replaces_the_whole_object(self, objects: ObjectStore) -> None:
        objects.put("files/a", b"long and old")
        objects.put("files/a", b"new")
        assert objects.get("files/a") == b"new"

    def test_empty_object_is_an_object(self, objects: ObjectStore) -> None:
        objects.put("open/batch_1", b"")
        objects.put("open/batch_2", io.BytesIO())
        assert objects.size("open/batch_1") == objects.size("open/batch_2") == 0
        assert objects.get("open/batch_1") == b""
        with objects.open("open/batch_2") as file:
            assert file.readline() == b""

    def test_absent_object_is_not_found(self, objects: ObjectStore) -> None:
        objects.put("jobs/1/job.json", b"{}")
        for key in ("files/none", "jobs/1", "jobs/1/job.json/x"):
            assert objects.size(key) is None
            with pytest.raises(errors.NotFound, match=f"'{key}'"):
                objects.get(key)
            with pytest.raises(errors.NotFound, match=f"'{key}'"):
                objects.open(key)
            objects.delete(key)
        assert objects.get("jobs/1/job.json") == b"{}"

    def test_delete_removes_only_its_object(self, objects: ObjectStore) -> None:
        objects.put("a/b/c", b"1")
        objects.put("a/b/d", b"2")
        objects.delete("a/b/c")
        objects.delete("a/b/c")
        assert objects.size("a/b/c") is None
        objects.delete("a/b/d")
        assert list(objects.list("")) == []
        objects.put("a/b/c", b"3")
        assert objects.get("a/b/c") == b"3"

    def test_list_yields_keys_by_any_beginning(self, objects: ObjectStore) -> None:
        keys = [
            "jobs/1/parts/5-a",
            "jobs/1/parts/50-b",
            "jobs/1/parts/6-c",
            "jobs/1/plan/5/0",
            "jobs/10/x",
            "z",
        ]
        for size, key in enumerate(keys):
            objects.put(key, b"x" * size)

        def found(prefix: str) -> list[str]:
            return sorted(found.key for found in objects.list(prefix))

        assert found("") == sorted(keys)
        assert found("jobs/1/") == sorted(keys[:4])
        assert found("jobs/1") == sorted(keys[:5])
        assert found("jobs/1/parts/5") == keys[:2]
        assert found("jobs/1/parts/5-") == keys[:1]
        assert found("jobs/1/p") == sorted(keys[:4])
        assert found("jobs/1/plan/5/0") == ["jobs/1/plan/5/0"]
        assert found("jobs/2/") == found("none") == []
        assert list(objects.list("jobs/1/parts/6")) == [Object("jobs/1/parts/6-c", 2)]

    def test_list_yields_keys_between_two_that_need_not_exist(self, objects: ObjectStore) -> None:
        keys = [f"index/t/batch_{name}" for name in ("01a", "01b", "02a", "03z")]
        for key in [*keys, "index/u/batch_01c"]:
            objects.put(key, b"")

        def found(after: str, before: str = "") -> list[str]:
            return sorted(found.key for found in objects.list("index/t/", after, before))

        assert found("") == found("index/t/batch_00") == keys
        assert found(keys[0]) == found("index/t/batch_01aa") == keys[1:]
        assert found(keys[3]) == found("index/u") == []
        assert found("", keys[2]) == found("", "index/t/batch_01c") == keys[:2]
        assert found(keys[0], keys[2]) == keys[1:2]

    def test_what_is_listed_may_be_deleted_on_the_way(self, objects: ObjectStore) -> None:
        for n in range(30):
            objects.put(f"jobs/{n % 3}/parts/{n}", b"x")
        for found in objects.list("jobs/"):
            objects.delete(found.key)
        assert list(objects.list("jobs/")) == []

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_key_that_is_not_ours_is_refused(self, objects: ObjectStore, key: str) -> None:
        for use in (
            lambda: objects.put(key, b"x"),
            lambda: objects.put_new(key, b"x"),
            lambda: objects.get(key),
            lambda: objects.open(key),
            lambda: objects.size(key),
            lambda: objects.delete(key),
            lambda: objects.writer(key).__enter__(),
        ):
            with pytest.raises(errors.InvalidRequest, match="is not a key of the store"):
                use()

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../", "a//", "/etc/"])
    def test_prefix_that_is_not_ours_is_refused(self, objects: ObjectStore, prefix: str) -> None:
        with pytest.raises(errors.InvalidRequest, match="is not a prefix"):
            objects.list(prefix)

    def test_open_reads_lines_from_any_byte(self, objects: ObjectStore) -> None:
        lines = [b'{"n": %d}\n' % n for n in range(20_000)]
        data = b"".join(lines)
        objects.put("files/lines", data)
        with objects.open("files/lines") as file:
            assert file.readline() == lines[0]
            assert file.read(3) == lines[1][:3]
            assert file.readline() == lines[1][3:]
            assert list(file) == lines[2:]
        start = data.index(b"12345")
        with objects.open("files/lines", start) as file:
            assert file.read() == data[start:]
        for start in (len(data), len(data) + 5):
            with objects.open("files/lines", start) as file:
                assert file.read() == b""

    def test_put_new_writes_only_once(self, objects: ObjectStore) -> None:
        assert objects.put_new("jobs/1/manifest.json", b"first") is True
        assert objects.put_new("jobs/1/manifest.json", b"second") is False
        assert objects.put_new("jobs/1/manifest.json", b"first") is False
        assert objects.get("jobs/1/manifest.json") == b"first"
        objects.delete("jobs/1/manifest.json")
        assert objects.put_new("jobs/1/manifest.json", b"third") is True

    def test_one_of_many_put_new_wins(self, objects: ObjectStore) -> None:
        with ThreadPoolExecutor(5) as pool:
            for n in range(2):  # few: SeaweedFS lets some of the losers wait for seconds
                barrier = threading.Barrier(5)

                def race(
                    who: int, key: str = f"idempotency/{n}", barrier: threading.Barrier = barrier
                ) -> bool:
                    barrier.wait()
                    return objects.put_new(key, b"%d" % who)

                won = list(pool.map(race, range(5)))
                assert won.count(True) == 1
                assert objects.get(f"idempotency/{n}") == b"%d" % won.index(True)

    def test_large_stream_arrives_whole(self, objects: ObjectStore) -> None:
        data = random.Random(1).randbytes(17 * MEGABYTE + 3)
        assert objects.put("files/big", io.BytesIO(data)) == len(data)
        assert objects.size("files/big") == len(data)
        assert objects.get("files/big") == data
        with objects.writer("files/written") as out:
            for start in range(0, len(data), 1_000_003):
                assert out.write(data[start : start + 1_000_003]) > 0
        assert objects.get("files/written") == data

    def test_large_stream_is_never_in_memory(self, objects: ObjectStore) -> None:
        objects.put("warm", Zeros(1))  # type: ignore[arg-type]
        tracemalloc.start()
        try:
            size = 64 * MEGABYTE
            assert objects.put("files/big", cast(BinaryIO, Zeros(size))) == size
            with objects.open("files/big") as file:
                assert sum(len(block) for block in iter(lambda: file.read(MEGABYTE), b"")) == size
            assert tracemalloc.get_traced_memory()[1] < 40 * MEGABYTE
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("size", [10, 20 * MEGABYTE])
    def test_writer_shows_nothing_before_its_end(self, objects: ObjectStore, size: int) -> None:
        with objects.writer("files/a") as out:
            out.write(bytes(size))
            assert objects.size("files/a") is None
            assert list(objects.list("")) == []
        assert objects.size("files/a") == size

    @pytest.mark.parametrize("size", [0, 10, 20 * MEGABYTE])
    def test_writer_leaves_nothing_on_an_exception(self, objects: ObjectStore, size: int) -> None:
        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error), objects.writer("files/a") as out:  # noqa: PT012
                out.write(bytes(size))
                raise error
        assert list(objects.list("")) == []
        self.assert_no_drafts(objects)

    def test_stream_that_breaks_leaves_the_old_object(self, objects: ObjectStore) -> None:
        objects.put("files/a", b"old")
        with pytest.raises(ConnectionResetError):
            objects.put("files/a", cast(BinaryIO, Zeros(30 * MEGABYTE, breaks_at=20 * MEGABYTE)))
        assert objects.get("files/a") == b"old"
        self.assert_no_drafts(objects)

    def test_reader_keeps_what_it_opened(self, objects: ObjectStore) -> None:
        objects.put("files/a", b"old")
        with objects.open("files/a") as file:
            objects.put("files/a", b"newer")
            assert file.read() == b"old"

    def test_threads_share_a_store(self, objects: ObjectStore) -> None:
        def work(n: int) -> None:
            for m in range(5):
                objects.put(f"t/{n}/{m}", b"%d" % n)
                assert objects.get(f"t/{n}/{m}") == b"%d" % n
                objects.delete(f"t/{n}/{m}")  # leaves a directory empty while others fill it

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert list(objects.list("t/")) == []

    def test_check_of_a_good_store_says_nothing(self, objects: ObjectStore) -> None:
        objects.check()
        assert list(objects.list("")) == []

    def assert_no_drafts(self, objects: ObjectStore) -> None:
        """Assert that nothing half-written takes up room."""
        raise NotImplementedError
