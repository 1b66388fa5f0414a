"""A system on which faults strike, and the seeds of the rounds."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from jobs.embedded import SeaweedServer
from tests.chaos.scene import OwnRedis, Scene, Set
from tests.integration.system.conftest import Start, start_system, system, tiny

__all__ = ["start_system", "system", "tiny"]

ROUNDS = int(os.environ.get("LONGHAUL_CHAOS_ROUNDS", "2"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes a seed for many rounds, all but the first in the long tier."""
    named = {name for mark in metafunc.definition.iter_markers("parametrize") for name in mark.args[:1]}
    if "seed" in metafunc.fixturenames and "seed" not in named:
        marks = [[] if seed == 0 else [pytest.mark.long] for seed in range(ROUNDS)]
        metafunc.parametrize("seed", [pytest.param(n, marks=m) for n, m in enumerate(marks)])


@pytest.fixture
def scene(system: Start, tmp_path: Path, seed: int) -> Set:
    """Set a scene: a system whose engine takes 0.2 s for four requests, with these settings changed."""

    def make(**changes: object) -> Scene:
        trace = tmp_path / "computed"
        values = {"max_running": 4, "lease_seconds": 2, "heartbeat_seconds": 0.5, "reap_seconds": 0.3}
        return Scene(system(faults=("slow:0.2", f"trace:{trace}"), **(values | changes)), trace, seed)

    return make


@pytest.fixture
def on_s3(scene: Set, seaweedfs: SeaweedServer) -> Scene:
    """Set a scene whose store is SeaweedFS."""
    place = f"s3://{seaweedfs.bucket}/{uuid4().hex}"
    return scene(store_url=place, s3_endpoint_url=seaweedfs.endpoint_url)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    """A Redis that a test may kill and start again."""
    running = OwnRedis(tmp_path / "redis")
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def _credentials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the keys of SeaweedFS to all who talk to it, as AWS's own tools would find them."""
    if "seaweedfs" in request.fixturenames:
        server = request.getfixturevalue("seaweedfs")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
