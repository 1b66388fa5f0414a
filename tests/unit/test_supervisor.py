"""The life of a service: stopped once, on time, with an exit code that tells the truth."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jobs import errors
from worker import supervisor


class Twin:
    """A service that does what the test says."""

    def __init__(self, start: Callable[[], None] = lambda: None, drains: bool = True) -> None:
        self.failed: str | None = None
        self.retired = False
        self.loading = False
        self.stops = 0
        self._start, self._drains = start, drains
        self._stopped = threading.Event()

    def start(self) -> None:
        self._start()

    def begin_stop(self) -> None:
        self.stops += 1
        if self._drains:
            self._stopped.set()

    def wait(self, timeout: float) -> bool:
        return self._stopped.wait(timeout)

    def wake(self) -> None: ...

    def ending(self) -> dict[str, int]:
        return {"finished": 2, "given_back": 1, "left_to_expire": 0}

    def run_unit(self, kind: str, job_id: str) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}


class Life:
    """A supervisor around a twin, with what it asked of the worker."""

    def __init__(self, twin: Twin, busy: bool = False) -> None:
        self.failing, self.woken, self.codes = threading.Event(), threading.Event(), list[int]()
        self.finished = threading.Event()
        self.supervisor = supervisor.Supervisor(
            twin,
            0.1,
            end=self._end,
            wake=self.woken.set,
            busy=lambda: busy,
            finish=self._finish,
        )
        self.supervisor.start()

    def _end(self, code: int) -> None:
        self.asked = code
        self.failing.set()

    def _finish(self, code: int) -> None:
        self.codes.append(code)
        self.finished.set()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"RELEASE_SECONDS": 0.3, "CLOSE_SECONDS": 0.1, "LOADING_SECONDS": 0.1}.items():
        monkeypatch.setattr(supervisor, name, seconds)
    monkeypatch.setattr(supervisor, "_TICK_SECONDS", 0.05)


def test_many_stops_are_one() -> None:
    twin = Twin()
    life = Life(twin)
    for _ in range(5):
        life.supervisor.begin_stop()
    life.supervisor.wait()
    assert twin.stops == 1
    assert life.woken.is_set()
    assert life.supervisor.exit_code == 0


def test_a_stop_does_not_wait_for_a_model_that_loads() -> None:
    endless = threading.Event()

    def load() -> None:
        endless.wait(30)

    life = Life(Twin(start=load, drains=False))
    life.supervisor.begin_stop()
    begun = time.monotonic()
    life.supervisor.wait()
    assert time.monotonic() - begun < 0.35
    assert life.supervisor.loading
    assert life.supervisor.exit_code == 0
    endless.set()


def test_a_service_that_does_not_drain_is_a_failure_and_the_process_ends() -> None:
    life = Life(Twin(drains=False))
    life.supervisor.begin_stop()
    assert life.finished.wait(5)
    assert life.codes == [1]


def test_a_process_that_hangs_after_draining_ends_with_success() -> None:
    life = Life(Twin())
    life.supervisor.begin_stop()
    assert life.finished.wait(5)
    assert life.codes == [0]


def test_units_that_run_have_the_whole_drain_time() -> None:
    life = Life(Twin(), busy=True)
    begun = time.monotonic()
    life.supervisor.begin_stop()
    assert life.finished.wait(5)
    assert time.monotonic() - begun >= 0.4


def _missing_model() -> None:
    raise errors.ModelUnavailable(name="m", source="s", reason="gone")


def _bug() -> None:
    raise RuntimeError("bug")


@pytest.mark.parametrize(
    ("start", "line"),
    [
        (
            _missing_model,
            "longhaul: Model 'm' cannot be loaded from 's': gone. Check LONGHAUL_MODELS.\n",
        ),
        (_bug, "longhaul: The service cannot start: RuntimeError('bug'). The log says where.\n"),
    ],
)
def test_a_service_that_cannot_start_ends_the_worker_with_one_line(
    start: Callable[[], None], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life(Twin(start=start))
    assert life.failing.wait(5)
    life.supervisor.wait()
    assert life.supervisor.exit_code == 1
    assert capsys.readouterr().err == line


def test_a_service_that_has_retired_ends_the_worker_well() -> None:
    twin = Twin()
    life = Life(twin)
    twin.retired = True
    assert life.failing.wait(5)
    assert life.asked == 0
    life.supervisor.wait()
    assert (twin.stops, life.supervisor.exit_code) == (1, 0)


def test_a_service_that_fails_later_ends_the_worker(capsys: pytest.CaptureFixture[str]) -> None:
    twin = Twin()
    life = Life(twin)
    time.sleep(0.1)
    twin.failed = "The engine ended."
    assert life.failing.wait(5)
    life.supervisor.wait()
    assert (twin.stops, life.supervisor.exit_code) == (1, 1)
    assert capsys.readouterr().err == "longhaul: The engine ended.\n"
