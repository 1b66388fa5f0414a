"""A whole system: real Redis, a store, the API, and workers as a user starts them."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jobs.embedded import RedisServer
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from tests.integration.system.system import MODEL, System
from worker.engine.tiny import tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random model, one token a byte."""
    return tiny_model(tmp_path_factory.mktemp("tiny"))


Start = Callable[..., System]


@pytest.fixture(scope="session")
def start_system(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, tiny: Path
) -> Iterator[Start]:
    """Start a system of its own with these settings changed. `faults` are those of the echo engine."""
    started: list[System] = []

    def start(engine: str = "echo", faults: tuple[str, ...] = (), **changes: Any) -> System:
        directory = tmp_path_factory.mktemp("system")
        values: dict[str, Any] = {
            "redis_url": redis_server.url,
            "namespace": f"test-{uuid.uuid4().hex}",
            "store_url": f"file://{directory}/store",
            "models": {MODEL: ModelSettings(source=str(tiny), engine=engine, faults=faults)},
            "scratch_dir": directory,
            "lease_seconds": 3,
            "heartbeat_seconds": 1,
            "poll_seconds": 0.2,
            "reap_seconds": 0.5,
            "flush_seconds": 0.2,
            "drain_seconds": 10,
        }
        started.append(System(Settings(**(values | changes)), directory))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def system(start_system: Start) -> Iterator[Start]:
    """As start_system; what a test starts ends with it."""
    with ExitStack() as stack:

        def start(**changes: Any) -> System:
            one = start_system(**changes)
            stack.callback(one.stop)
            return one

        yield start


@pytest.fixture(scope="module")
def shared(start_system: Start) -> Iterator[System]:
    """A system of this module with one worker whose engine echoes."""
    one = start_system()
    one.start_worker()
    yield one
    one.stop()
