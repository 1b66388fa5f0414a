"""A round's scene: a system, jobs that run on it, a moment to strike, and the random numbers of a seed."""

import random
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.embedded import RedisServer
from tests.chaos.rounds import Round, Watch
from tests.faulty_http import Fault, Proxy
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import System, Worker, said

ROWS = 60
Set = Callable[..., "Scene"]


class Scene:
    """A system with what a round of a fault needs."""

    def __init__(self, one: System, trace: Path, seed: int) -> None:
        self.one, self.random = one, random.Random(seed)
        self.watch = Watch(one, trace)
        self.jobs: dict[str, list[str]] = {}

    def workers(self, count: int = 2, **changes: str) -> list[Worker]:
        """Start workers and wait until they serve."""
        started = [self.one.start_worker(**changes) for _ in range(count)]
        return [worker.wait_serving() for worker in started]

    def submit(self, rows: int = ROWS, **fields: Any) -> str:
        """Create a job of so many rows; return its id."""
        names = [f"{len(self.jobs)}-{n}" for n in range(rows)]
        job_id = self.one.submit((said(name, f"text {name}") for name in names), **fields)
        self.jobs[job_id] = names
        return job_id

    def run_a_while(self, job_id: str) -> None:
        """Wait until a part of the job's rows is done, and then a little, both at random."""
        self.one.wait_done(job_id, self.random.randrange(4, len(self.jobs[job_id]) // 3))
        time.sleep(self.random.uniform(0, 0.3))

    def settle(self, fault: str) -> Round:
        """Wait for the jobs to end; fail unless all is in order; report the round."""
        return self.watch.settle(fault, self.jobs)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Let no script of the ledger run meanwhile, so that what is noted is what the fault meets."""
        client = self.one.ledger.redis
        client.execute_command("CLIENT", "PAUSE", 2000, "WRITE")
        try:
            yield
        finally:
            with suppress(redis.RedisError):  # it was killed meanwhile
                client.execute_command("CLIENT", "UNPAUSE")


class OwnRedis:
    """A Redis of one test, found again on the same port after it was killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = self._start()
        self.url = self.now.url

    def kill(self) -> None:
        self.now.server.kill()

    def start(self, empty: bool = False) -> None:
        """Start it again, with what it had or with nothing."""
        if empty:
            shutil.rmtree(self.directory)
        self.now = self._start(self.now.port)

    def stop(self) -> None:
        self.now.server.kill()

    def _start(self, port: int | None = None) -> RedisServer:
        made = RedisServer(self.directory, self.directory.with_suffix(".log"), port)
        made.wait_ready()
        return made


class Moment:
    """A call to the store that hangs: when a worker makes it, a fault can strike in the middle of it."""

    def __init__(self, method: str, place: str, proxies: list[Proxy], hang_seconds: float) -> None:
        self._method, self._place = method, place
        self._proxies, self._caller = proxies, -1
        self._fault = Fault(self._wanted, hang_seconds=hang_seconds)
        for proxy in proxies:
            proxy.faults.append(self._fault)

    def wait(self) -> int:
        """Wait for the call; return whose proxy it came through."""
        wait_until(lambda: self._caller >= 0, f"{self._method} {self._place}", 30)
        return self._caller

    def _wanted(self, request: BaseHTTPRequestHandler) -> bool:
        if request.command != self._method or self._place not in request.path:
            return False
        self._caller = next(n for n, proxy in enumerate(self._proxies) if proxy is request.proxy)  # type: ignore[attr-defined]
        return True


def tiers(cases: Iterable[tuple[Any, ...]], everyday: Container[tuple[Any, ...]]) -> list[Any]:
    """Return cases as parameters of a test; those that are not everyday are left to the long tier."""
    return [
        pytest.param(
            *case,
            marks=() if case in everyday else pytest.mark.long,
            id="-".join(getattr(value, "name", None) or str(value) for value in case),
        )
        for case in cases
    ]


def wait_stopped(worker: Worker) -> None:
    """Wait until SIGSTOP has reached it."""

    def stopped() -> bool:
        stat = Path(f"/proc/{worker.process.pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0] == "T"

    wait_until(stopped, "stopped")


def workers_of(one: System, job_id: str) -> dict[int, str]:
    """Return which worker's result counts, by row."""
    prefix = len("0-")
    return {int(each["custom_id"][prefix:]): each["worker"] for each in one.metrics(job_id)}
