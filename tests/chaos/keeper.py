"""Keeps workers running, as whatever runs them in production does: one that ends is started again."""

import resource
import threading
from collections.abc import Callable
from typing import Self

from tests.integration.system.system import System, Worker

_TICK_SECONDS = 0.1


class Keeper:
    """Starts `count` workers and replaces those that end, until left. `ended` has their exit statuses;
    `on_end` is called for each. `memory_bytes` is the most that a worker may take.
    """

    def __init__(
        self,
        one: System,
        count: int = 1,
        memory_bytes: int | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.ended: list[int] = []
        self._one, self._count, self._memory, self._on_end = one, count, memory_bytes, on_end
        self._kept: list[Worker] = []
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._keep)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._leaving.wait(_TICK_SECONDS):
            ended = [worker for worker in self._kept if worker.process.poll() is not None]
            for worker in ended:
                self.ended.append(int(worker.process.returncode))
                self._on_end()
            self._kept = [worker for worker in self._kept if worker not in ended]
            while len(self._kept) < self._count:
                self._kept.append(self._start())

    def _start(self) -> Worker:
        worker = self._one.start_worker()
        if self._memory:
            resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (self._memory, self._memory))
        return worker
