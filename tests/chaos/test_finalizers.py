"""Two finalizers that hold the same job at the same moment: one manifest counts, its files are all there."""

import threading
import time
from typing import Any

from jobs.ledger import Ledger
from tests.chaos.scene import Scene, Set
from tests.chaos.test_moments import readable
from tests.integration.api.serving import Hand
from tests.integration.celery_worker import wait_until
from worker.control import Control

ROWS = 10


class Gate:
    """A store whose conditional puts wait until there are two: manifests are written at once."""

    def __init__(self, one: Scene, both: threading.Barrier, came: threading.Event) -> None:
        self._inner, self._both, self._came = one.one.store, both, came
        self._lag = one.random.uniform(0, 0.005)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put_new(self, key: str, data: bytes) -> bool:
        self._came.set()
        self._both.wait(20)
        time.sleep(self._lag)
        return self._inner.put_new(key, data)


def test_two_finalizers_write_their_manifests_at_once(scene: Set) -> None:
    # Race: the first has renewed its lease and is about to write; then it is silent for longer than that.
    one = scene(lease_seconds=1, reap_seconds=3600)
    job_id = one.one.api.create(*(names := [f"0-{n}" for n in range(ROWS)]))
    one.jobs[job_id] = names
    hand = Hand(one.one.api.context, job_id, ROWS)
    hand.begin()
    hand.part(*((row, name, False) for row, name in enumerate(names)))
    hand.end()
    one.watch.struck()
    both = threading.Barrier(2)
    first, came_first = finalizer(one, both)
    first.start()
    assert came_first.wait(20)
    time.sleep(one.one.settings.lease_seconds + 0.2)
    second, _ = finalizer(one, both)
    second.start()
    for thread in (first, second):
        thread.join(30)
        assert not thread.is_alive()
    one.settle("two finalizers write their manifests at once")
    readable(one, job_id)


def finalizer(one: Scene, both: threading.Barrier) -> tuple[threading.Thread, threading.Event]:
    """Return a thread that finalizes as a worker does, and whether it is about to write the manifest."""
    settings, came = one.one.settings, threading.Event()
    store: Any = Gate(one, both, came)
    ledger = Ledger.connect(settings)
    control = Control(settings, ledger, store, lambda _: None)

    def run() -> None:
        wait_until(lambda: control.run_unit("finalize"), "a finalize unit was free", 20)
        ledger.close()

    return threading.Thread(target=run, daemon=True), came
