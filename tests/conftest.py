"""Real servers for the integration tests: one Redis and one SeaweedFS for the whole run."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import redis

from jobs import embedded, ports

# Before torch is loaded: threads that wait for one another spin, and where others want the cores, too, a test
# of compiled kernels takes 15 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure() -> None:
    """Have Ctrl-C heard, also where a shell started the tests in the background and so ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.RedisServer]:
    """A Redis of this test run: `.url`, `.port`, `.server`."""
    directory = tmp_path_factory.mktemp("redis")
    running = embedded.RedisServer(directory, directory / "redis.log")
    try:
        running.wait_ready()
        yield running
    finally:
        running.server.stop()


@pytest.fixture
def redis_url(redis_server: embedded.RedisServer) -> str:
    """The URL of an empty database."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.SeaweedServer]:
    """An S3 store of this test run: `.endpoint_url`, `.access_key`, `.secret_key`, `.bucket`."""
    directory = tmp_path_factory.mktemp("seaweedfs")
    running = embedded.SeaweedServer(directory / "data", directory / "seaweedfs.log", embedded.S3Keys.make())
    try:
        running.wait_ready()
        yield running
    finally:
        running.server.stop()


@pytest.fixture
def free_port() -> int:
    """A TCP port that nothing listens on."""
    return ports.take()


def pytest_collection_finish() -> None:
    """Have a collection of garbage, of which each engine that is closed asks for one, look at no modules."""
    gc.collect()
    gc.freeze()
