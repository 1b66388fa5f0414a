"""A store that fails in every way: no job ends without its files, no row is computed twice, all goes on."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import IO

import boto3
import pytest
from _pytest.mark import ParameterSet

from api.app import create_app
from jobs import errors
from jobs.embedded import SeaweedServer
from jobs.settings import Settings
from tests.chaos import faulty_store
from tests.chaos.faulty_store import FaultyStore
from tests.faulty_http import Fault, Storm, method, proxied
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import System

Start = Callable[..., System]
TIMEOUT_SECONDS = 1.0
SEEDS = 6


def everything(_: BaseHTTPRequestHandler) -> bool:
    return True


MODES = {
    "503": {"status": 503, "code": "SlowDown"},
    "silence": {"hang_seconds": TIMEOUT_SECONDS + 1},
    "reset": {"resets": True},
    "half a request": {"tears": True},
    "half an answer": {"cut_after": 20},
    "lost answer": {"loses_answer": True},
}
CALLS = {
    "begin an upload": method("POST", "?uploads"),
    "upload a piece": method("PUT", "partNumber="),
    "end an upload": method("POST", "uploadId="),
    "claim a key": method("PUT", "/idempotency/"),
    "write a record": method("PUT", "/job.json"),
    "write a plan": method("PUT", "/plan/"),
    "write a part": method("PUT", "/parts/"),
    "write a file": method("PUT", "/out/"),
    "write the manifest": method("PUT", "/manifest.json"),
    "read the input": method("GET", "/files/"),
    "read a record": method("GET", "/job.json"),
    "read a plan": method("GET", "/plan/"),
    "read a part": method("GET", "/parts/"),
    "read the manifest": method("GET", "/manifest.json"),
    "read a file": method("GET", "/out/"),
    "look for the manifest": method("HEAD", "/manifest.json"),
    "list": method("GET", "list-type=2"),
    "delete": method("DELETE"),
}


# The calls whose answer has a body, of which half can be lost.
ANSWERED = [name for name in CALLS if name.split()[0] in ("begin", "end", "read", "list")]


def _in_tiers(modes: Iterable[str | float], *long: str | float) -> list[ParameterSet]:
    """Return parameters of which some belong to the long tier."""
    marks = {name: [pytest.mark.long] for name in long}
    return [pytest.param(mode, marks=marks.get(mode, [])) for mode in modes]


@contextmanager
def started(
    start: Start, seaweedfs: SeaweedServer, directory: Path, **changes: object
) -> Iterator[FaultyStore]:
    """Start a system with two workers behind a proxy of its own."""
    trace = directory / "computed"
    values = {"s3_timeout_seconds": TIMEOUT_SECONDS} | faulty_store.settings(seaweedfs) | changes
    with proxied(seaweedfs.endpoint_url) as proxy:
        one = start(faults=("slow:0.1", f"trace:{trace}"), max_running=4, s3_endpoint_url=proxy.url, **values)
        made = FaultyStore(one, proxy, trace)
        try:
            workers = [one.start_worker() for _ in range(2)]
            for worker in workers:
                worker.wait_serving()
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def faulty(
    start_system: Start, seaweedfs: SeaweedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyStore]:
    """A system that lives through many rounds: what one leaves behind, the next would meet."""
    with started(start_system, seaweedfs, tmp_path_factory.mktemp("faulty")) as one:
        yield one


@pytest.mark.parametrize("mode", _in_tiers(MODES, "silence", "half a request"))
def test_each_kind_of_call_may_fail_twice(faulty: FaultyStore, mode: str) -> None:
    calls = {name: CALLS[name] for name in (ANSWERED if mode == "half an answer" else CALLS)}
    faults = {name: Fault(wanted, times=2, **MODES[mode]) for name, wanted in calls.items()}

    def begin() -> None:
        faulty.proxy.faults.extend(faults.values())
        faulty.ask("GET", "/v1/files")

    faulty.run(f"store: {mode}, each kind of call", begin, padding=9 << 20)
    assert {name: fault.times for name, fault in faults.items() if fault.times} == {}


def storm(seed: int, *modes: str) -> Storm:
    return Storm(seed, 0.25, [Fault(everything, **MODES[mode]) for mode in modes])


def test_any_call_may_fail_in_any_way(faulty: FaultyStore) -> None:
    made = storm(0, *MODES)
    faulty.run("store: everything at random", lambda: setattr(faulty.proxy, "storm", made))
    assert made.times > 5


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, SEEDS))
@pytest.mark.parametrize("mode", MODES)
def test_any_call_may_fail_in_this_way(faulty: FaultyStore, mode: str, seed: int) -> None:
    made = storm(seed, mode)
    faulty.run(f"store: {mode} at random", lambda: setattr(faulty.proxy, "storm", made))
    assert made.times > 5


@pytest.mark.parametrize("mode", _in_tiers(("503", "silence", "credentials"), "silence"))
def test_a_store_that_is_away_for_a_while_stops_nothing_for_longer(faulty: FaultyStore, mode: str) -> None:
    # Race: rows are in the engine, in memory, and in parts when the store goes away.
    fault = MODES.get(mode, {"forges": True})

    def away() -> None:
        wait_until(lambda: sum(faulty.watch.computed().values()) >= before + 4, "some are computed")
        refused = faulty.ask.refused
        faulty.proxy.faults.append(Fault(everything, times=1 << 30, **fault))
        time.sleep(4)
        began = time.monotonic()
        answer = faulty.one.api.http.post("/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"})
        assert answer.status_code == 503
        assert answer.headers["Retry-After"]
        assert time.monotonic() - began < faulty_store.ANSWER_SECONDS
        assert faulty.one.api.http.get("/healthz").status_code == 200
        faulty.proxy.faults.clear()
        assert faulty.ask.refused >= refused

    before = sum(faulty.watch.computed().values())
    faulty.run(f"store: {mode} for a while", lambda: None, away, rows=40)


def test_a_wrong_secret_from_the_start_ends_both_with_one_line(faulty: FaultyStore) -> None:
    one = faulty.one
    worker = one.start_worker(LONGHAUL_S3_SECRET_ACCESS_KEY="another-secret")
    assert worker.process.wait(30) == 1
    assert "the secret access key is wrong" in worker.log
    with pytest.raises(errors.StoreUnreachable, match="the secret access key is wrong"):
        create_app(Settings(**(one.settings.model_dump() | {"s3_secret_access_key": "another-secret"})))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", _in_tiers((0.3, 2), 2))
def test_a_slow_store_is_only_slow(
    system: Start, seaweedfs: SeaweedServer, tmp_path: Path, seconds: float
) -> None:
    with started(system, seaweedfs, tmp_path, s3_timeout_seconds=10) as one:
        slow = Fault(everything, times=1 << 30, hang_seconds=seconds)
        one.run(f"store: slow by {seconds:g} s a call", lambda: one.proxy.faults.append(slow), rows=12)
        assert one.ask.refused == 0


def test_a_bucket_that_is_gone_is_waited_for(system: Start, seaweedfs: SeaweedServer, tmp_path: Path) -> None:
    s3 = boto3.client(
        "s3",
        endpoint_url=seaweedfs.endpoint_url,
        aws_access_key_id=seaweedfs.access_key,
        aws_secret_access_key=seaweedfs.secret_key,
        region_name="us-east-1",
    )
    s3.create_bucket(Bucket="gone")
    values = faulty_store.settings(seaweedfs, "gone")

    def take_away() -> dict[str, bytes]:
        listed = s3.list_objects_v2(Bucket="gone").get("Contents", [])
        kept = {one["Key"]: s3.get_object(Bucket="gone", Key=one["Key"])["Body"].read() for one in listed}
        for key in kept:
            s3.delete_object(Bucket="gone", Key=key)
        s3.delete_bucket(Bucket="gone")
        return kept

    with started(system, seaweedfs, tmp_path, **values) as one:

        def away() -> None:
            wait_until(lambda: sum(one.watch.computed().values()) >= 4, "some are computed")
            # Nobody may write between the copy and the end of the bucket.
            one.proxy.faults.append(Fault(everything, times=1 << 30, status=503))
            time.sleep(0.5)
            kept = take_away()
            # SeaweedFS makes a bucket for whoever writes into it, which others refuse.
            writes = ("PUT", "POST")
            gone = {"status": 404, "code": "NoSuchBucket"}
            one.proxy.faults[:] = [Fault(method(name), times=1 << 30, **gone) for name in writes]
            time.sleep(4)
            answer = one.one.api.http.get("/v1/files")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            s3.create_bucket(Bucket="gone")
            for key, data in kept.items():
                s3.put_object(Bucket="gone", Key=key, Body=data)
            one.proxy.faults.clear()

        one.run("store: the bucket is gone for a while", lambda: None, away, rows=40)
    s3.close()


class Disk:
    """A small file system of its own, in a namespace that a shell holds open."""

    def __init__(self, shell: subprocess.Popen[str], path: Path) -> None:
        assert shell.stdin is not None
        self._stdin: IO[str] = shell.stdin
        # Through /proc other processes see what is mounted in there only.
        self.path = Path(f"/proc/{shell.pid}/root{path}")

    def do(self, command: str, done: Callable[[], bool]) -> None:
        """Run a command in the namespace and wait until it is done."""
        self._stdin.write(command + "\n")
        self._stdin.flush()
        wait_until(done, command)

    def fill(self) -> None:
        with (self.path / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(b"x" * 4096)
            except OSError:
                pass

    def empty(self) -> None:
        (self.path / "ballast").unlink()

    def writable(self) -> bool:
        return not os.statvfs(self.path).f_flag & os.ST_RDONLY


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    # Not forked by it: the shell is the process that we know.
    shell = subprocess.Popen(["unshare", "-Urm", "sh"], stdin=subprocess.PIPE, text=True)
    try:
        made = Disk(shell, mounted)
        assert shell.stdin is not None
        shell.stdin.write(f"mount -t tmpfs -o size=8m none {mounted} && touch {mounted}/ready || exit 1\n")
        shell.stdin.flush()
        try:
            wait_until(lambda: (made.path / "ready").exists() or shell.poll() is not None, "mounted")
        except PermissionError as error:
            pytest.skip(f"another process' mounts are not ours to see: {error}")
        if shell.poll() is not None:
            pytest.skip("this machine lets us mount nothing in a namespace of our own")
        yield made
    finally:
        shell.kill()
        shell.communicate()


@pytest.mark.parametrize("fault", _in_tiers(("full", "read-only"), "read-only"))
def test_a_disk_that_takes_nothing_is_waited_for(
    system: Start, tmp_path: Path, disk: Disk, fault: str
) -> None:
    trace = tmp_path / "computed"
    one = system(store_url=f"file://{disk.path}/store", faults=("slow:0.1", f"trace:{trace}"), max_running=4)
    one.start_worker().wait_serving()
    with proxied(one.api.url) as proxy:  # nothing goes through it: this store is no server
        faulty = FaultyStore(one, proxy, trace)

        def away() -> None:
            wait_until(lambda: sum(faulty.watch.computed().values()) >= 4, "some are computed")
            if fault == "full":
                disk.fill()
            else:
                disk.do(f"mount -o remount,ro {tmp_path}/disk", lambda: not disk.writable())
            time.sleep(3)
            upload = {"files": {"file": ("a", b"x" * 9000)}, "data": {"purpose": "batch"}}
            assert one.api.http.post("/v1/files", **upload).status_code == 503
            if fault == "full":
                disk.empty()
            else:
                disk.do(f"mount -o remount,rw {tmp_path}/disk", disk.writable)

        faulty.run(f"store: the disk is {fault} for a while", lambda: None, away, rows=40)
        faulty.close()
        drafts = disk.path / "store" / ".tmp"
        assert [left.name for left in drafts.iterdir() if left.name != "lock"] == []
