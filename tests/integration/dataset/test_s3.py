"""Inputs of `longhaul generate` in a bucket of a real SeaweedFS."""

import gzip
import io
from collections.abc import Callable

import boto3
import pyarrow as pa
import pytest
from pyarrow import parquet

from jobs import embedded, ids
from jobs.dataset.input import input_errors, source

Put = Callable[[str, bytes], None]


@pytest.fixture
def longhaul_settings(monkeypatch: pytest.MonkeyPatch, seaweedfs: embedded.SeaweedServer) -> None:
    monkeypatch.setenv("LONGHAUL_S3_ENDPOINT_URL", seaweedfs.endpoint_url)
    monkeypatch.setenv("LONGHAUL_S3_ACCESS_KEY_ID", seaweedfs.access_key)
    monkeypatch.setenv("LONGHAUL_S3_SECRET_ACCESS_KEY", seaweedfs.secret_key)


@pytest.fixture
def aws_variables(monkeypatch: pytest.MonkeyPatch, seaweedfs: embedded.SeaweedServer) -> None:
    monkeypatch.setenv("LONGHAUL_S3_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.secret_key)


@pytest.fixture
def folder(seaweedfs: embedded.SeaweedServer) -> str:
    return f"s3://{seaweedfs.bucket}/inputs/{ids.ulid()}"


@pytest.fixture
def put(seaweedfs: embedded.SeaweedServer, folder: str) -> Put:
    """Write an object below the folder of this test."""
    client = boto3.client(
        "s3",
        endpoint_url=seaweedfs.endpoint_url,
        aws_access_key_id=seaweedfs.access_key,
        aws_secret_access_key=seaweedfs.secret_key,
        region_name="us-east-1",
    )
    prefix = folder.removeprefix(f"s3://{seaweedfs.bucket}/")
    return lambda name, data: client.put_object(Bucket=seaweedfs.bucket, Key=f"{prefix}/{name}", Body=data)


def read(place: str) -> list[dict[str, object]]:
    return [row for each in source.open_source(place).rows() for row in each.batch.to_pylist()]


def as_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(table, sink, row_group_size=1000)
    return sink.getvalue()


@pytest.mark.usefixtures("longhaul_settings")
def test_a_file_a_directory_and_a_glob_are_read_in_order(put: Put, folder: str) -> None:
    for number in (10, 2):
        put(f"d/part-{number}.jsonl.gz", gzip.compress(b'{"id": %d}\nbad\n' % number))
    put("d/.hidden.jsonl", b'{"id": 0}\n')
    put("d/README.md", b"# what this is")
    assert read(f"{folder}/d/part-2.jsonl.gz") == [{"id": 2}]
    for place in (f"{folder}/d", f"{folder}/d/", f"{folder}/*/part-*.gz", f"{folder}/**/*.jsonl.gz"):
        assert read(place) == [{"id": 2}, {"id": 10}]
    opened = source.open_source(f"{folder}/d")
    assert opened.place(1) == f"{folder}/d/part-2.jsonl.gz line 2"
    paths = [path for path, size, changed in opened.identity()["files"] if size and changed]
    assert paths == [f"{folder}/d/part-2.jsonl.gz", f"{folder}/d/part-10.jsonl.gz"]


@pytest.mark.usefixtures("longhaul_settings")
def test_parquet_is_read_by_row_groups(put: Put, folder: str) -> None:
    table = pa.table({"id": range(5000), "text": ["x" * 500] * 5000})
    put("a.parquet", as_parquet(table))
    opened = source.open_source(f"{folder}/a.parquet", columns=["id"], where="id % 1000 = 0")
    assert opened.count() == 5000
    assert [each.numbers.to_pylist() for each in opened.rows()] == [[at] for at in range(0, 5000, 1000)]


@pytest.mark.usefixtures("aws_variables")
def test_the_variables_of_aws_go_before_the_settings_of_longhaul(put: Put, folder: str) -> None:
    put("a.csv", b"a\n1\n")
    assert read(f"{folder}/a.csv") == [{"a": "1"}]


@pytest.mark.usefixtures("longhaul_settings")
def test_what_is_not_in_the_bucket_is_refused(put: Put, folder: str) -> None:
    put("a.csv", b"a\n1\n")
    with pytest.raises(input_errors.InputMissing, match=r"b\.csv"):
        source.open_source(f"{folder}/b.csv")
    with pytest.raises(input_errors.InputEmpty, match="no files"):
        source.open_source(f"{folder}/*.jsonl")
    with pytest.raises(input_errors.InputError, match="longhaul-nowhere"):
        source.open_source("s3://longhaul-nowhere/a.csv")


@pytest.mark.usefixtures("longhaul_settings")
def test_wrong_keys_are_an_error_that_names_the_place(
    monkeypatch: pytest.MonkeyPatch, put: Put, folder: str
) -> None:
    put("a.csv", b"a\n1\n")
    monkeypatch.setenv("LONGHAUL_S3_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(input_errors.InputUnreadable, match=r"a\.csv") as caught:
        source.open_source(f"{folder}/a.csv")
    assert "wrong" not in str(caught.value)
