"""A worker is struck in the middle of planning, of writing a part, of finalizing. The store is SeaweedFS."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from jobs import finalize
from jobs.embedded import SeaweedServer
from tests.chaos import scene as scenes
from tests.chaos.scene import Moment, Scene
from tests.chaos.test_workers import end, noticed
from tests.faulty_http import Proxy, proxied
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import Worker

MOMENTS = {
    "planning": "/plan/",
    "writing a part": "/parts/",
    "writing the output": "/out/",
    "writing the manifest": "/manifest.json",
}
STRIKES = {
    signal.SIGKILL: "killed (-9)",
    signal.SIGTERM: "told to stop (SIGTERM)",
    signal.SIGSTOP: "stopped for longer than its lease",
}
EVERYDAY = {
    ("planning", signal.SIGKILL),
    ("writing a part", signal.SIGSTOP),
    ("writing the output", signal.SIGTERM),
    ("writing the manifest", signal.SIGKILL),
    ("writing the manifest", signal.SIGSTOP),
}
HANG_SECONDS = 3.0


@pytest.fixture
def proxies(seaweedfs: SeaweedServer) -> Iterator[list[Proxy]]:
    """Two proxies before the store, one for each worker."""
    with ExitStack() as stack:
        yield [stack.enter_context(proxied(seaweedfs.endpoint_url)) for _ in range(2)]


def workers_behind(one: Scene, proxies: list[Proxy]) -> list[Worker]:
    started = [one.one.start_worker(LONGHAUL_S3_ENDPOINT_URL=proxy.url) for proxy in proxies]
    return [worker.wait_serving() for worker in started]


@pytest.mark.parametrize(
    ("moment", "number"), scenes.tiers([(moment, each) for moment in MOMENTS for each in STRIKES], EVERYDAY)
)
def test_a_worker_is_struck_in_the_middle(
    on_s3: Scene, proxies: list[Proxy], moment: str, number: signal.Signals
) -> None:
    # The call that hangs reaches the store late, when somebody else may have done the same.
    one = on_s3
    workers = workers_behind(one, proxies)
    hanging = Moment("PUT", MOMENTS[moment], proxies, HANG_SECONDS)
    job_id = one.submit(24)
    victim = workers[hanging.wait()]
    time.sleep(one.random.uniform(0, 0.4))
    if number is signal.SIGSTOP:
        victim.signal(number)
        scenes.wait_stopped(victim)
        one.watch.struck(lives_on=True)
    elif number is signal.SIGKILL:
        end(victim, number, 0)
        one.watch.struck()
    else:
        one.watch.struck(lives_on=True)
        end(victim, number, one.one.settings.drain_seconds)
    one.settle(f"a worker is {STRIKES[number]} while {moment}")
    readable(one, job_id)
    if number is signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        wait_until(lambda: came_to_an_end(victim), "the zombie came to an end")
        readable(one, job_id)
        one.one.accounted(job_id, one.jobs[job_id])
        one.one.left_nothing()


def came_to_an_end(zombie: Worker) -> bool:
    """Whether it was refused, or found that what it wanted to write is there already."""
    finalized = [event for event in zombie.events("unit done") if event["unit"] == "finalize"]
    return bool(noticed(zombie) or zombie.events("unit lost") or finalized)


def readable(one: Scene, job_id: str) -> None:
    """Fail unless every file that the manifest names is there, as long as it says."""
    assert one.one.batch(job_id).status == "completed"
    manifest = finalize.found(one.one.store, job_id)
    assert manifest is not None
    assert set(manifest.files) == {"output", "metrics", "summary"}
    for made in manifest.files.values():
        assert one.one.store.size(made["key"]) == made["bytes"]
        file = one.one.api.client.files.content(made["id"]).content
        assert len(file) == made["bytes"]
