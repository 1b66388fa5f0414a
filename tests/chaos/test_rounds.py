"""Rounds of faults at random moments; the seed of a round is in its name, so that it can be run again."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.embedded import RedisServer
from tests.integration.system.system import System, Worker, said

Start = Callable[..., System]
LINES = 60
ROUNDS = 8


class Chaos:
    """Does something bad every second or so, and keeps two workers around."""

    def __init__(self, one: System, redis: RedisServer, directory: Path, seed: int) -> None:
        self.one, self.redis, self.directory = one, redis, directory
        self.random = random.Random(seed)
        self.done: list[str] = []

    def run(self, job_ids: list[str], faults: int) -> None:
        for _ in range(faults):
            time.sleep(self.random.uniform(0.3, 1.5))
            if all(self.one.store.size(f"jobs/{job_id}/manifest.json") is not None for job_id in job_ids):
                return
            fault = self.random.choice([self.kill, self.terminate, self.stop_for_a_while, self.restart_redis])
            self.done.append(fault.__name__)
            fault()
            self._fill_up()

    def kill(self) -> None:
        self._victim().kill()

    def terminate(self) -> None:
        self._victim().signal(signal.SIGTERM)

    def stop_for_a_while(self) -> None:
        # Longer than a lease: what it held is taken over, and it comes back as a zombie.
        victim = self._victim()
        victim.signal(signal.SIGSTOP)
        time.sleep(self.one.settings.lease_seconds * self.random.uniform(0.5, 1.5))
        victim.signal(signal.SIGCONT)

    def restart_redis(self) -> None:
        self.redis.server.kill()
        time.sleep(self.random.uniform(0, 1))
        self.redis = RedisServer(self.directory, self.directory / "redis.log", self.redis.port)
        self.redis.wait_ready()

    def _victim(self) -> Worker:
        return self.random.choice(self._alive())

    def _alive(self) -> list[Worker]:
        return [worker for worker in self.one.workers if worker.process.poll() is None]

    def _fill_up(self) -> None:
        while len(self._alive()) < 2:
            self.one.start_worker()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_every_line_counts_once_whatever_happens(system: Start, tmp_path: Path, seed: int) -> None:
    redis = RedisServer(tmp_path, tmp_path / "redis.log")
    redis.wait_ready()
    one = system(
        redis_url=redis.url, faults=("slow:0.3",), max_running=4, lease_seconds=2, heartbeat_seconds=0.5
    )
    chaos = Chaos(one, redis, tmp_path, seed)
    try:
        for _ in range(2):
            one.start_worker()
        names = [[f"{job}-{n}" for n in range(LINES)] for job in "ab"]
        job_ids = [one.submit(said(name, f"text {name}") for name in each) for each in names]
        chaos.run(job_ids, faults=8)
        for job_id, expected in zip(job_ids, names, strict=True):
            batch = one.finished(job_id, 180)
            assert batch.status == "completed", chaos.done
            counts = batch.request_counts
            assert (counts.total, counts.completed + counts.failed) == (LINES, LINES), chaos.done
            one.accounted(job_id, expected)
    finally:
        chaos.redis.server.stop()
