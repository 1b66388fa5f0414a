"""What Redis may do in the middle of a job. Workers go on by themselves."""

import os
import subprocess
import sys
import time

import orjson
import pytest
import redis

from tests import faulty_redis
from tests.chaos import scene as scenes
from tests.chaos.scene import OwnRedis, Scene, Set
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import environment, line

BODY = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "requests": [line("a")]}
NEVER = 3600


def kill(one: Scene, own_redis: OwnRedis) -> None:
    """Kill Redis between two scripts, all written to its file, so that what is in flight is what was noted.

    What it forgets when its file lacks the last second is struck step by step in test_every_step.
    """
    with one.still():
        one.one.ledger.redis.config_set("appendfsync", "always")
        one.watch.struck(lives_on=True)
        own_redis.kill()


def away(one: Scene, own_redis: OwnRedis, seconds: float, empty: bool = False) -> None:
    """Kill Redis and start it again after so long."""
    kill(one, own_redis)
    time.sleep(seconds)
    own_redis.start(empty)
    one.watch.over()


def test_redis_restarts_with_its_data(scene: Set, own_redis: OwnRedis) -> None:
    one = scene(redis_url=own_redis.url)
    workers = one.workers()
    one.run_a_while(one.submit())
    away(one, own_redis, one.random.uniform(0, 1))
    one.settle("Redis is killed and restarts with its append-only file")
    assert all(worker.process.poll() is None for worker in workers)


def test_redis_is_away_for_longer_than_leases_last(scene: Set, own_redis: OwnRedis, seed: int) -> None:
    # After so long the workers get a grace of two heartbeats to renew what they hold.
    one = scene(redis_url=own_redis.url, heartbeat_seconds=1, lease_seconds=3)
    workers = one.workers()
    one.run_a_while(one.submit())
    seconds = 6 if seed == 0 else 30
    away(one, own_redis, seconds)
    made = one.settle(f"Redis is away for {seconds} s")
    assert made.recomputed == 0
    assert all(worker.process.poll() is None for worker in workers)


def test_redis_restarts_with_nothing(scene: Set, own_redis: OwnRedis) -> None:
    one = scene(redis_url=own_redis.url)
    one.workers()
    one.run_a_while(one.submit())
    away(one, own_redis, one.random.uniform(0, 1), empty=True)
    one.settle("Redis restarts with nothing")


@pytest.mark.parametrize("commands", scenes.tiers([(1,), (2,)], {(2,)}))
def test_redis_restarts_with_nothing_and_longhaul_recover_is_run(
    scene: Set, own_redis: OwnRedis, commands: int
) -> None:
    # Nobody reaps, so that nothing but the command brings the job back.
    one = scene(redis_url=own_redis.url, reap_seconds=NEVER)
    one.workers()
    job_id = one.submit()
    one.run_a_while(job_id)
    away(one, own_redis, 0, empty=True)
    told = [recover(one) for _ in range(commands)]
    found = [process.communicate(timeout=60) for process in told]
    assert [process.returncode for process in told] == [0] * commands, found
    assert sum(out.decode().split().count(job_id) for out, _ in found) == 1, found
    one.settle(
        "Redis restarts with nothing, `longhaul recover` is run"
        if commands == 1
        else "Redis restarts with nothing, two `longhaul recover` run at once"
    )


def recover(one: Scene) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jobs.cli", "recover"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LONGHAUL_")}
    return subprocess.Popen(
        command, env=clean | environment(one.one.settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_redis_is_full_for_a_while(scene: Set, own_redis: OwnRedis) -> None:
    one = scene(redis_url=own_redis.url)
    workers = one.workers()
    one.run_a_while(one.submit(120))
    with redis.Redis.from_url(own_redis.url) as client:
        one.watch.struck(lives_on=True)
        client.config_set("maxmemory", 1)
        accepted = one.one.api.http.post("/v1/batches", json=BODY)
        time.sleep(one.random.uniform(1, 4))
        client.config_set("maxmemory", 0)
    # The store has it, and it is entered in Redis when there is room again.
    assert accepted.status_code == 200, accepted.text
    one.jobs[accepted.json()["id"]] = ["a"]
    one.watch.over()
    made = one.settle("Redis is full for some seconds")
    assert made.recomputed == 0
    assert all(worker.process.poll() is None for worker in workers)


def test_redis_answers_half_a_second_late(scene: Set, own_redis: OwnRedis) -> None:
    # Heartbeats as often in a lease as by default: each takes several answers.
    with faulty_redis.proxied(own_redis.url) as proxy:
        one = scene(redis_url=proxy.url, heartbeat_seconds=1, lease_seconds=6)
        workers = one.workers()
        one.run_a_while(one.submit(40))
        one.watch.struck()
        proxy.delay_seconds = 0.5
        wait_until(lambda: one.watch.done(one.watch.in_work), "work goes on", 60)
        went_on = time.monotonic()
        one.one.finished(next(iter(one.jobs)), 100)
        proxy.delay_seconds = 0.0
        made = one.watch.settle("Redis answers 0.5 s late", one.jobs, went_on)
        assert made.recomputed == 0
        assert all(worker.process.poll() is None for worker in workers)


def test_connections_to_redis_are_cut_in_the_middle(scene: Set, own_redis: OwnRedis, seed: int) -> None:
    with faulty_redis.proxied(own_redis.url, seed) as proxy:
        one = scene(redis_url=proxy.url)
        workers = one.workers()
        one.run_a_while(one.submit(120))
        one.watch.struck(lives_on=True)
        proxy.cut_share = 0.1
        wait_until(lambda: proxy.cuts > 30, "cut often", 60)
        proxy.cut_share = 0.0
        one.watch.over()
        one.settle("connections to Redis are cut in the middle of a request or an answer")
        assert all(worker.process.poll() is None for worker in workers)
        assert orjson.loads(one.one.api.http.get("/readyz").content)
