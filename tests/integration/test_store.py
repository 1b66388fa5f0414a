"""The store in a bucket of a real SeaweedFS, undisturbed and behind a proxy that fails."""

import io
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest

from jobs import embedded, errors, ids, store_s3, store_s3_calls
from jobs.settings import Settings
from jobs.store import ObjectStore, open_store
from tests import faulty_http
from tests.faulty_http import Fault, method
from tests.store_contract import StoreContract

MEGABYTE = 1 << 20
PREFIX = "some/where"

Opened = Callable[..., ObjectStore]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_s3_calls, "FIRST_DELAY_SECONDS", 0.001)


@pytest.fixture
def opened(seaweedfs: embedded.SeaweedServer) -> Opened:
    """Open the store of this test, with other settings where they are given."""
    values: dict[str, Any] = {
        "store_url": f"s3://{seaweedfs.bucket}/{PREFIX}/{ids.ulid()}",
        "s3_endpoint_url": seaweedfs.endpoint_url,
        "s3_access_key_id": seaweedfs.access_key,
        "s3_secret_access_key": seaweedfs.secret_key,
    }
    return lambda **others: open_store(Settings(**(values | others)))


@pytest.fixture
def objects(opened: Opened) -> ObjectStore:
    return opened()


@pytest.fixture
def proxy(seaweedfs: embedded.SeaweedServer) -> Iterator[faulty_http.Proxy]:
    with faulty_http.proxied(seaweedfs.endpoint_url) as running:
        yield running


@pytest.fixture
def faulty(opened: Opened, proxy: faulty_http.Proxy) -> ObjectStore:
    """The same store, seen through the proxy."""
    return opened(s3_endpoint_url=proxy.url)


class TestS3Store(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, seaweedfs: embedded.SeaweedServer) -> None:
        self.server = seaweedfs

    def assert_no_drafts(self, objects: ObjectStore) -> None:
        client = boto3.client(
            "s3",
            endpoint_url=self.server.endpoint_url,
            aws_access_key_id=self.server.access_key,
            aws_secret_access_key=self.server.secret_key,
            region_name="us-east-1",
        )
        assert client.list_multipart_uploads(Bucket=self.server.bucket).get("Uploads", []) == []
        client.close()


def test_prefixes_of_one_bucket_are_apart(opened: Opened, seaweedfs: embedded.SeaweedServer) -> None:
    one, other = opened(), opened(store_url=f"s3://{seaweedfs.bucket}/{ids.ulid()}/")
    one.put("a", b"one")
    assert other.size("a") is None
    assert list(other.list("")) == []


def test_list_goes_on_after_a_thousand(objects: ObjectStore) -> None:
    keys = {f"many/{n}" for n in range(1003)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: objects.put(key, b""), keys))
    assert {found.key for found in objects.list("many/")} == keys


@pytest.mark.parametrize(
    "fault", [{"status": 503}, {"status": 500}, {"loses_answer": True}, {"resets": True}]
)
def test_every_operation_survives_passing_failures(
    faulty: ObjectStore, proxy: faulty_http.Proxy, fault: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fail_three_times() -> None:
        proxy.faults[:] = [Fault(lambda request: True, times=3, **fault)]

    fail_three_times()
    faulty.put("a", b"x")
    fail_three_times()
    assert faulty.get("a") == b"x"
    fail_three_times()
    assert faulty.size("a") == 1
    fail_three_times()
    assert [found.key for found in faulty.list("")] == ["a"]
    fail_three_times()
    faulty.delete("a")
    assert faulty.size("a") is None
    fail_three_times()
    faulty.put("a", io.BytesIO(b"y" * 20 * MEGABYTE))
    assert faulty.size("a") == 20 * MEGABYTE
    assert all(fault.times == 0 for fault in proxy.faults)
    records = [vars(record) for record in caplog.records if record.levelno == logging.WARNING]
    assert len(records) == 18
    assert (records[0]["operation"], records[0]["attempt"]) == ("put_object", 1)


def test_failure_that_does_not_pass_is_reported(faulty: ObjectStore, proxy: faulty_http.Proxy) -> None:
    proxy.faults[:] = [Fault(lambda request: True, times=100, status=503, code="SlowDown")]
    with pytest.raises(errors.StoreUnreachable, match="the server answered 503 SlowDown"):
        faulty.put("a", b"x")
    assert len(proxy.seen) == store_s3_calls.ATTEMPTS


def test_refusal_is_not_retried(faulty: ObjectStore, proxy: faulty_http.Proxy) -> None:
    proxy.faults[:] = [Fault(lambda request: True, times=100, status=403, code="AccessDenied")]
    with pytest.raises(errors.StoreUnreachable, match=r"access denied \(.*/a\)"):
        faulty.put("a", b"x")
    assert len(proxy.seen) == 1


def test_read_goes_on_where_the_connection_broke(faulty: ObjectStore, proxy: faulty_http.Proxy) -> None:
    data = random.Random(2).randbytes(3 * MEGABYTE)
    faulty.put("a", data)
    proxy.faults[:] = [Fault(method("GET"), times=2, cut_after=n * 200_001) for n in (2, 0, 1, 3)]
    with faulty.open("a", 7) as file:
        assert file.read(100) == data[7:107]
        assert file.read() == data[107:]
    assert all(fault.times == 0 for fault in proxy.faults)


def test_read_never_mixes_two_objects(faulty: ObjectStore, proxy: faulty_http.Proxy) -> None:
    faulty.put("a", b"a" * MEGABYTE)
    proxy.faults[:] = [Fault(method("GET"), cut_after=600_000)]
    with faulty.open("a") as file:
        file.read(10)
        faulty.put("a", b"b" * MEGABYTE)
        with pytest.raises(errors.StoreUnreachable, match="replaced while it was read"):
            file.read()


@pytest.mark.parametrize("size", [5, 20 * MEGABYTE])
def test_writer_that_cannot_finish_leaves_nothing(
    faulty: ObjectStore, proxy: faulty_http.Proxy, size: int
) -> None:
    proxy.faults[:] = [
        Fault(method("POST", "uploadId="), times=100, status=503),
        Fault(lambda request: request.command == "PUT" and "partNumber" not in request.path, 100, status=503),
    ]
    with pytest.raises(errors.StoreUnreachable):
        faulty.put("a", io.BytesIO(bytes(size)))
    assert faulty.size("a") is None
    assert any(seen.startswith("DELETE") for seen in proxy.seen) == (size > MEGABYTE)


def test_put_new_whose_answer_is_lost_still_knows_that_it_won(
    faulty: ObjectStore, proxy: faulty_http.Proxy
) -> None:
    proxy.faults[:] = [Fault(method("PUT"), loses_answer=True)]
    assert faulty.put_new("a", b"x") is True
    assert faulty.put_new("a", b"x") is False


def test_put_new_waits_while_the_key_is_in_flux(faulty: ObjectStore, proxy: faulty_http.Proxy) -> None:
    proxy.faults[:] = [Fault(method("PUT"), times=3, status=409, code="ConditionalRequestConflict")]
    assert faulty.put_new("a", b"x") is True
    assert faulty.get("a") == b"x"


def test_put_new_told_409_for_a_taken_key_lost(
    faulty: ObjectStore, objects: ObjectStore, proxy: faulty_http.Proxy
) -> None:
    objects.put("a", b"other")
    # The first look comes before the other writer is done.
    proxy.faults[:] = [
        Fault(method("HEAD"), status=404),
        Fault(method("PUT"), status=409, code="FileAlreadyExists"),
    ]
    assert faulty.put_new("a", b"x") is False
    assert faulty.get("a") == b"other"


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_server_without_conditional_writes_still_never_overwrites(
    faulty: ObjectStore,
    proxy: faulty_http.Proxy,
    status: int,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy.faults[:] = [
        Fault(lambda request: "If-None-Match" in request.headers, times=100, status=status, code=code)
    ]
    assert faulty.put_new("a", b"x") is True
    assert faulty.put_new("a", b"y") is False
    assert faulty.put_new("b", b"z") is True
    assert (faulty.get("a"), faulty.get("b")) == (b"x", b"z")
    assert proxy.faults[0].times == 99
    assert caplog.text.count("no conditional writes") == 1


def test_400_for_another_reason_is_an_error(faulty: ObjectStore, proxy: faulty_http.Proxy) -> None:
    proxy.faults[:] = [Fault(method("PUT"), times=2, status=400, code="ExpiredToken")]
    with pytest.raises(errors.StoreUnreachable, match="400 ExpiredToken"):
        faulty.put_new("a", b"x")
    assert faulty.put_new("a", b"x") is True


def test_completed_upload_whose_answer_is_lost_is_complete(
    faulty: ObjectStore, proxy: faulty_http.Proxy
) -> None:
    proxy.faults[:] = [Fault(method("POST", "uploadId="), loses_answer=True)]
    assert faulty.put("a", io.BytesIO(bytes(10 * MEGABYTE))) == 10 * MEGABYTE
    assert faulty.size("a") == 10 * MEGABYTE


def test_upload_that_the_server_threw_away_is_an_error(faulty: ObjectStore, proxy: faulty_http.Proxy) -> None:
    faulty.put("a", io.BytesIO(bytes(9 * MEGABYTE)))
    proxy.faults[:] = [Fault(method("POST", "uploadId="), status=404, code="NoSuchUpload")]
    with pytest.raises(errors.StoreUnreachable, match="aborted by the server"):
        faulty.put("a", io.BytesIO(bytes(10 * MEGABYTE)))
    assert faulty.size("a") == 9 * MEGABYTE


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"store_url": "s3://not-there"}, "bucket 'not-there' does not exist"),
        ({"s3_access_key_id": "nobody"}, "the access key id is not known"),
        ({"s3_secret_access_key": "wrong-secret"}, "the secret access key is wrong"),
        ({"s3_endpoint_url": "http://me:wrong-secret@127.0.0.1:1"}, "http://127.0.0.1:1: Connection refused"),
    ],
)
def test_check_says_what_is_wrong(opened: Opened, others: dict[str, str], reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(errors.StoreUnreachable) as caught:
        opened(**others).check()
    assert time.monotonic() - start < 3
    text = str(caught.value)
    assert reason in text
    assert "\n" not in text
    assert "wrong-secret" not in text


def test_check_does_not_wait_for_a_silent_server(opened: Opened, proxy: faulty_http.Proxy) -> None:
    proxy.faults[:] = [Fault(lambda request: True, times=100, hang_seconds=20)]
    start = time.monotonic()
    with pytest.raises(errors.StoreUnreachable, match="no answer from"):
        opened(s3_endpoint_url=proxy.url).check()
    assert time.monotonic() - start < 6


@pytest.mark.parametrize("fault", [{"status": 503}, {"hang_seconds": 5}, {"resets": True}, {"tears": True}])
def test_in_a_hurry_a_call_is_given_up_in_time(
    seaweedfs: embedded.SeaweedServer,
    proxy: faulty_http.Proxy,
    fault: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_s3, "HURRY_SECONDS", 0.3)
    monkeypatch.setattr(store_s3_calls, "FIRST_DELAY_SECONDS", 0.1)
    hurried = open_store(
        Settings(
            store_url=f"s3://{seaweedfs.bucket}/{ids.ulid()}",
            s3_endpoint_url=proxy.url,
            s3_access_key_id=seaweedfs.access_key,
            s3_secret_access_key=seaweedfs.secret_key,
        ),
        hurried=True,
    )
    proxy.faults[:] = [Fault(lambda request: True, times=100, **fault)]
    start = time.monotonic()
    with pytest.raises(errors.StoreUnreachable):
        hurried.put("a", b"xyz")
    assert time.monotonic() - start < 2
    proxy.faults.clear()
    assert hurried.size("a") is None


def test_bucket_that_is_gone_is_not_an_absent_object(opened: Opened) -> None:
    gone = opened(store_url="s3://not-there")
    with pytest.raises(errors.StoreUnreachable, match="bucket 'not-there' does not exist"):
        gone.get("a")
    with pytest.raises(errors.StoreUnreachable, match="bucket 'not-there' does not exist"):
        list(gone.list(""))


def test_unusable_endpoint_is_a_settings_error(opened: Opened) -> None:
    with pytest.raises(errors.SettingsError, match="LONGHAUL_S3_ENDPOINT_URL is not a URL"):
        opened(s3_endpoint_url="host port")
    with pytest.raises(errors.SettingsError, match="LONGHAUL_S3_SECRET_ACCESS_KEY"):
        opened(s3_secret_access_key=None)
