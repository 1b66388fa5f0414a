"""Rounds of faults at random moments; the seed of a round is in its name, so that it can be run again."""

import random
import signal
import time
from collections.abc import Callable

import pytest
import redis

from tests.chaos.scene import OwnRedis
from tests.integration.system.system import System, Worker, said

Start = Callable[..., System]
LINES = 60
ROUNDS = 8


class Chaos:
    """Does something bad every second or so, and keeps two workers around."""

    def __init__(self, one: System, own_redis: OwnRedis, seed: int) -> None:
        self.one, self.redis = one, own_redis
        self.random = random.Random(seed)
        self.done: list[str] = []
        self.faults = [
            self.kill,
            self.terminate,
            self.stop_for_a_while,
            self.restart_redis,
            self.empty_redis,
            self.fill_redis,
        ]

    def run(self, job_ids: list[str], faults: int) -> None:
        for _ in range(faults):
            time.sleep(self.random.uniform(0.3, 1.5))
            if all(self.one.store.size(f"jobs/{job_id}/manifest.json") is not None for job_id in job_ids):
                return
            fault = self.random.choice(self.faults)
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

    def restart_redis(self, empty: bool = False) -> None:
        self.redis.kill()
        time.sleep(self.random.uniform(0, 1))
        self.redis.start(empty)

    def empty_redis(self) -> None:
        self.restart_redis(empty=True)

    def fill_redis(self) -> None:
        with redis.Redis.from_url(self.redis.url) as client:
            client.config_set("maxmemory", 1)
            time.sleep(self.random.uniform(0, 2))
            client.config_set("maxmemory", 0)

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
def test_every_line_counts_once_whatever_happens(system: Start, own_redis: OwnRedis, seed: int) -> None:
    one = system(
        redis_url=own_redis.url, faults=("slow:0.3",), max_running=4, lease_seconds=2, heartbeat_seconds=0.5
    )
    chaos = Chaos(one, own_redis, seed)
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
