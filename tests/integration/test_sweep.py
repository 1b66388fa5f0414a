"""The sweep of a bucket, and who of several processes sweeps it."""

import io
import threading
import time
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis

from jobs import embedded, ids
from jobs.settings import Settings
from jobs.store import ObjectStore, open_store
from jobs.sweep import DAY, Sweep
from jobs.sweeper import Sweeper, SweepRuns
from tests import faulty_http
from tests.sweep_contract import SweepContract


@pytest.fixture
def settings(seaweedfs: embedded.SeaweedServer, redis_url: str, tmp_path: Path) -> Settings:
    return Settings(
        redis_url=redis_url,
        store_url=f"s3://{seaweedfs.bucket}/{ids.ulid()}",
        s3_endpoint_url=seaweedfs.endpoint_url,
        s3_access_key_id=seaweedfs.access_key,
        s3_secret_access_key=seaweedfs.secret_key,
        scratch_dir=tmp_path,
        sweep_seconds=0.5,
    )


@pytest.fixture
def objects(settings: Settings) -> ObjectStore:
    return open_store(settings)


class TestSweepOfBucket(SweepContract):
    pass


def test_uploads_left_open_for_a_day_are_aborted_and_those_of_others_are_not(
    settings: Settings, objects: ObjectStore, seaweedfs: embedded.SeaweedServer, tmp_path: Path
) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=seaweedfs.endpoint_url,
        aws_access_key_id=seaweedfs.access_key,
        aws_secret_access_key=seaweedfs.secret_key,
        region_name="us-east-1",
    )
    home = settings.store_url.rpartition("/")[2]

    def open_upload(key: str) -> None:
        upload = client.create_multipart_upload(Bucket=seaweedfs.bucket, Key=key)["UploadId"]
        where: dict[str, Any] = {"Bucket": seaweedfs.bucket, "Key": key, "UploadId": upload}
        client.upload_part(PartNumber=1, Body=bytes(5 << 20), **where)

    def uploads(prefix: str) -> list[str]:
        found = client.list_multipart_uploads(Bucket=seaweedfs.bucket, Prefix=prefix)
        return [upload["Key"].removeprefix(home) for upload in found.get("Uploads", ())]

    ours = ["/files/a", "/jobs/b/out/1/output.jsonl"]
    for key in (*(home + key for key in ours), f"{home}/other", f"{home}x/files/a"):
        open_upload(key)

    def sweep(later: float, dry_run: bool = False) -> dict[str, int]:
        clock = lambda: time.time() + later  # noqa: E731
        return dict(Sweep(objects, tmp_path, clock=clock, dry_run=dry_run).run().bytes)

    assert sweep(DAY - 60) == {}
    assert sweep(DAY + 60, dry_run=True) == {"drafts": 2 * (5 << 20)}
    assert sorted(uploads(home + "/")) == [*ours, "/other"]
    assert sweep(DAY + 60) == {"drafts": 2 * (5 << 20)}
    assert sweep(DAY + 60) == {}
    assert uploads(home + "/") == ["/other"]
    assert uploads(home + "x/") == ["x/files/a"]
    for prefix in (f"{home}/", f"{home}x/"):
        for upload in client.list_multipart_uploads(Bucket=seaweedfs.bucket, Prefix=prefix)["Uploads"]:
            client.abort_multipart_upload(
                Bucket=seaweedfs.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
    client.close()


def test_a_server_that_cannot_list_uploads_is_named_once_and_swept_all_the_same(
    settings: Settings,
    seaweedfs: embedded.SeaweedServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with faulty_http.proxied(seaweedfs.endpoint_url) as proxy:
        proxy.faults[:] = [
            faulty_http.Fault(
                lambda request: "uploads" in request.path, times=100, status=501, code="NotImplemented"
            )
        ]
        objects = open_store(Settings(**(settings.model_dump() | {"s3_endpoint_url": proxy.url})))
        for _ in range(2):
            Sweep(objects, tmp_path).run()
    assert caplog.text.count("multipart uploads cannot be listed") == 1


def test_one_of_many_processes_sweeps_and_then_none_until_it_is_due(
    settings: Settings, objects: ObjectStore, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with redis.Redis.from_url(redis_url) as client:
        sweepers = [Sweeper(settings, client, objects) for _ in range(5)]

        def turns() -> int:
            caplog.clear()
            threads = [threading.Thread(target=one.turn) for one in sweepers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return caplog.text.count("swept")

        assert turns() == 1
        assert turns() == 0
        time.sleep(0.6)
        assert turns() == 1


def test_a_sweep_beside_another_is_refused_until_that_ends_or_its_process_died(
    settings: Settings, objects: ObjectStore, redis_url: str
) -> None:
    with redis.Redis.from_url(redis_url) as client:
        one, other = Sweeper(settings, client, objects), Sweeper(settings, client, objects)
        with one._lease(), pytest.raises(SweepRuns):
            other.run()
        other.run()
        client.set("{longhaul}:sweep", "of one that died", px=200)
        with pytest.raises(SweepRuns):
            other.run()
        time.sleep(0.3)
        other.run()


def test_a_process_that_stops_breaks_its_sweep_off(
    settings: Settings, objects: ObjectStore, redis_url: str
) -> None:
    for number in range(200):
        objects.put(f"idempotency/default/{number}.json", b"{}")
    with redis.Redis.from_url(redis_url) as client:
        sweeper = Sweeper(settings, client, objects)
        sweeper.stopping.set()
        sweeper.turn()
        assert client.exists("{longhaul}:sweep") == 0


def test_an_upload_through_the_store_is_not_aborted_while_it_runs(
    objects: ObjectStore, tmp_path: Path
) -> None:
    class Body(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            Sweep(objects, tmp_path).run()
            return super().read(size)

    assert objects.put(f"files/{ids.file_id()}", Body(bytes(20 << 20))) == 20 << 20
