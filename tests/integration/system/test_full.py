"""What has no room: a Redis that is full, a scratch directory that is."""

from collections.abc import Callable
from pathlib import Path

import redis

from jobs.embedded import RedisServer
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import System, said

Start = Callable[..., System]


def names(count: int) -> list[str]:
    return [f"r{n}" for n in range(count)]


def test_full_redis_lets_what_it_holds_be_finished_and_seen(system: Start, tmp_path: Path) -> None:
    # What is in the queues must be able to leave it: nothing else brings memory back.
    running = RedisServer(tmp_path / "redis", tmp_path / "redis.log")
    try:
        running.wait_ready()
        one = system(redis_url=running.url, faults=("slow:0.2",), max_running=8)
        worker = one.start_worker().wait_serving()
        job_id = one.submit(said(name, f"text {name}") for name in names(48))
        one.wait_done(job_id, 8)
        with redis.Redis.from_url(running.url) as client:
            client.config_set("maxmemory", "1mb")
            batch = one.finished(job_id)
            # A batch that comes now is accepted (it is stored) and waits for room.
            later = one.submit([said("later", "text")])
            assert one.batch(later).status == "validating"
            client.config_set("maxmemory", "0")
        assert batch.request_counts.model_dump() == {"total": 48, "completed": 48, "failed": 0}
        one.accounted(job_id, names(48))
        one.finished(later)
        one.accounted(later, ["later"])
        wait_until(lambda: one.ledger.depth().control == 0, "control is empty")
        one.left_nothing()
        assert worker.process.poll() is None
    finally:
        running.server.stop()
