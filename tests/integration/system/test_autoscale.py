"""longhaul autoscale with real workers: from none and back, after deaths, never at the cost of what runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.settings import ModelSettings
from tests.chaos.scene import OwnRedis
from tests.integration.celery_worker import wait_until
from tests.integration.system import system as systems
from tests.integration.system.conftest import Start
from tests.integration.system.system import MODEL, System, said

Event = dict[str, Any]


class Scaler:
    """A running `longhaul autoscale` and what it said."""

    def __init__(self, one: System, directory: Path, *options: str, **changes: str) -> None:
        directory.mkdir(exist_ok=True)
        self.log, self._out = directory / "autoscale.log", directory / "autoscale.jsonl"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LONGHAUL_")}
        command = [
            sys.executable,
            "-m",
            "jobs.cli",
            "autoscale",
            "--json",
            "--logs",
            str(directory),
            *options,
        ]
        with self._out.open("wb") as out, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=clean | systems.environment(one.settings) | changes, stdout=out, stderr=log
            )

    def events(self, name: str) -> list[Event]:
        found = [json.loads(line) for line in self._out.read_text().splitlines()]
        return [event for event in found if event["event"] == name]

    def wait(self, name: str, count: int = 1, seconds: float = 40) -> list[Event]:
        """Wait for so many events of that name."""
        told = lambda: self._out.read_text() + self.log.read_text()  # noqa: E731
        wait_until(lambda: len(self.events(name)) >= count, f"{count} {name}: {told()}", seconds)
        return self.events(name)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(40)


Scale = Callable[..., Scaler]


@pytest.fixture
def scale(tmp_path: Path) -> Iterator[Scale]:
    """Start an autoscaler; it ends with the test."""
    started: list[Scaler] = []

    def start(one: System, *options: str, **changes: str) -> Scaler:
        started.append(Scaler(one, tmp_path / f"scaler{len(started)}", *options, **changes))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def quick(system: Start, **changes: Any) -> System:
    """A system whose scaling reacts within seconds."""
    return system(**{"scale_idle_seconds": 1, "heartbeat_seconds": 0.5, "max_running": 4} | changes)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_from_none_to_as_many_as_needed_and_back_to_none(system: Start, scale: Scale) -> None:
    one = quick(system, faults=("slow:0.3",))
    scaler = scale(one, "--cpus", "2")
    time.sleep(3)
    assert not scaler.events("start"), "nothing is to do"
    job_id = one.submit(said(str(n), f"text {n}") for n in range(120))
    assert one.finished(job_id).request_counts.completed == 120
    scaler.wait("ended", 2)
    first, *_, last = scaler.events("scale")
    assert (first["model"], first["from"], first["to"]) == (MODEL, 0, 1)
    assert (last["to"], last["reason"]) == (0, "nothing is left")
    assert {event["slot"] for event in scaler.events("start")} == {"cpu 0", "cpu 1"}
    assert all(event["status"] == 0 for event in scaler.events("ended"))
    assert one.ledger.fleet.present() == []
    assert scaler.stop(signal.SIGINT) == 0


def test_a_worker_that_is_killed_is_started_again(system: Start, scale: Scale) -> None:
    one = quick(system, faults=("slow:0.5",))
    job_id = one.submit(said(str(n), f"text {n}") for n in range(60))
    scaler = scale(one, "--cpus", "1")
    scaler.wait("serving")
    one.wait_done(job_id, 4)
    (started,) = scaler.events("start")
    os.kill(started["pid"], signal.SIGKILL)
    (crashed,) = scaler.wait("crashed")
    assert (crashed["status"], crashed["pause_seconds"], crashed["crashes"]) == (-9, 1, 1)
    assert one.finished(job_id).request_counts.completed == 60
    assert len(scaler.events("start")) == 2


def test_a_crash_loop_is_given_up_loudly(system: Start, scale: Scale, tmp_path: Path) -> None:
    absent = ModelSettings(source=str(tmp_path / "absent"), engine="echo")
    one = quick(system, models={MODEL: absent})
    scaler = scale(one, "--cpus", "1", "--min", "1")
    assert scaler.process.wait(100) == 1
    assert [event["pause_seconds"] for event in scaler.events("crashed")] == [1, 2, 4, 8]
    (event,) = scaler.events("gave_up")
    assert (event["slot"], event["model"], event["status"], event["crashes"]) == ("cpu 0", MODEL, 1, 5)
    assert "absent" in event["tail"]
    assert "No slot is left" in scaler.log.read_text()


def test_a_busy_worker_is_not_stopped_however_long_it_takes(system: Start, scale: Scale) -> None:
    # Fewer are needed long before the requests are done, and longer than drain_seconds.
    one = quick(system, faults=("slow:9",), drain_seconds=2, max_running=2)
    scaler = scale(one, "--cpus", "2", "--min", "2")
    scaler.wait("serving", 2)
    job_id = one.submit(said(str(n), f"text {n}") for n in range(4))
    wait_until(lambda: sum(each.held for each in one.ledger.fleet.present()) == 4, "claimed")
    names = [each.name for each in one.ledger.fleet.present()]
    one.ledger.fleet.retire(names)
    assert one.finished(job_id).request_counts.completed == 4
    assert {each["attempts"] for each in one.metrics(job_id)} == {0}
    workers = {each["worker"] for each in one.metrics(job_id)}
    assert workers <= set(names), "nobody else had to do it again"
    assert all(event["status"] == 0 for event in scaler.wait("ended", 2))


@pytest.mark.long
def test_it_keeps_what_runs_while_redis_is_away(system: Start, scale: Scale, tmp_path: Path) -> None:
    redis = OwnRedis(tmp_path / "redis")
    try:
        one = quick(system, redis_url=redis.url, faults=("slow:0.3",))
        scaler = scale(one, "--cpus", "1", "--min", "1")
        scaler.wait("serving")
        (started,) = scaler.events("start")
        redis.kill()
        scaler.wait("redis_away", seconds=30)
        time.sleep(2)
        assert alive(started["pid"])
        redis.start()
        scaler.wait("redis_back", seconds=30)
        job_id = one.submit(said(str(n), f"text {n}") for n in range(8))
        assert one.finished(job_id).request_counts.completed == 8
        assert len(scaler.events("start")) == 1
        assert scaler.stop() == 0
        assert not alive(started["pid"])
    finally:
        redis.stop()


@pytest.mark.long
def test_several_models_share_one_slot_in_turn(system: Start, scale: Scale, tiny: Path) -> None:
    models = {name: ModelSettings(source=str(tiny), engine="echo") for name in ("m", "other")}
    one = quick(system, models=models)
    scaler = scale(one, "--cpus", "1")
    first = one.submit(said(str(n), f"text {n}") for n in range(6))
    second = one.submit(said(str(n), f"text {n}", model="other") for n in range(6))
    for job_id in (first, second):
        assert one.finished(job_id, 90).request_counts.completed == 6
    places = [(event["slot"], event["model"]) for event in scaler.events("start")]
    assert ("control", None) in places, "somebody had to plan before it was known whose requests they are"
    assert {("cpu 0", "m"), ("cpu 0", "other")} <= set(places)


def test_a_dry_run_says_what_it_would_do_and_starts_nothing(system: Start, scale: Scale) -> None:
    one = quick(system)
    one.submit(said(str(n), f"text {n}") for n in range(6))
    scaler = scale(one, "--cpus", "1", "--dry-run")
    (event,) = scaler.wait("would_scale")
    assert (event["from"], event["to"], event["reason"]) == (0, 1, "1 unit of a job is open")
    assert scaler.stop() == 0
    assert not scaler.events("start")


@pytest.mark.long
def test_two_of_one_namespace_do_not_share_a_slot(system: Start, scale: Scale) -> None:
    one = quick(system)
    first = scale(one, "--cpus", "1", "--min", "1")
    first.wait("start")
    second = scale(one, "--cpus", "1")
    assert second.process.wait(30) == 1
    assert f"(pid {first.process.pid}) has cpu 0" in second.log.read_text()
    assert first.stop() == 0


@pytest.mark.long
def test_workers_that_others_started_count(system: Start, scale: Scale) -> None:
    one = quick(system, faults=("slow:0.5",))
    one.start_worker().wait_serving()
    job_id = one.submit(said(str(n), f"text {n}") for n in range(12))
    scaler = scale(one, "--cpus", "1")
    assert one.finished(job_id).request_counts.completed == 12
    assert not scaler.events("start")


def test_a_worker_that_hangs_while_it_loads_is_killed_and_given_up_in_the_end(
    system: Start, scale: Scale
) -> None:
    one = quick(system, faults=("load:600",), scale_startup_limit_seconds=6)
    one.submit(said(str(n), f"text {n}") for n in range(4))
    scaler = scale(one, "--cpus", "1")
    (event,) = scaler.wait("hung", seconds=60)
    assert (event["slot"], event["model"], event["reason"]) == ("cpu 0", MODEL, "loading")
    assert 6 <= event["seconds"] < 15
    (crashed,) = scaler.wait("crashed")
    assert (crashed["status"], crashed["crashes"], crashed["pause_seconds"]) == (-9, 1, 1)
    scaler.wait("start", 2)
    assert scaler.stop() == 0
    assert not any(alive(event["pid"]) for event in scaler.events("start"))


@pytest.mark.long
def test_a_worker_that_was_stopped_does_not_keep_its_work_for_itself(system: Start, scale: Scale) -> None:
    one = quick(system, faults=("slow:0.3",))
    job_id = one.submit(said(str(n), f"text {n}") for n in range(20))
    scaler = scale(one, "--cpus", "2", "--max", "1", LONGHAUL_STEP_TIMEOUT_SECONDS="8")
    scaler.wait("serving")
    one.wait_done(job_id, 1)
    (started,) = scaler.events("start")
    os.kill(started["pid"], signal.SIGSTOP)
    (hung,) = scaler.wait("hung", seconds=60)
    assert (hung["slot"], hung["reason"]) == (started["slot"], "silent")
    assert one.finished(job_id).request_counts.completed == 20
    assert scaler.stop() == 0


def test_logs_may_be_for_people_and_be_taken_away(system: Start, scale: Scale) -> None:
    one = quick(system, faults=("slow:1",), log_format="text")
    job_id = one.submit(said(str(n), f"text {n}") for n in range(30))
    scaler = scale(one, "--cpus", "1")
    (started,) = scaler.wait("start")
    (scaler.log.parent / "worker-cpu0.log").unlink()
    scaler.wait("serving")
    os.kill(started["pid"], signal.SIGKILL)
    (crashed,) = scaler.wait("crashed")
    assert crashed["tail"] == "  (nothing)"
    assert one.finished(job_id).request_counts.completed == 30
    assert scaler.stop() == 0


def test_workers_go_on_when_nobody_reads_what_the_autoscaler_says(system: Start, scale: Scale) -> None:
    one = quick(system, faults=("slow:0.5",))
    command = [sys.executable, "-m", "jobs.cli", "autoscale", "--json", "--cpus", "1"]
    logs = ["--logs", str(one.settings.scratch_dir)]
    environment = os.environ | systems.environment(one.settings)
    with subprocess.Popen([*command, *logs], env=environment, stdout=subprocess.PIPE) as process:
        try:
            job_id = one.submit(said(str(n), f"text {n}") for n in range(20))
            assert process.stdout is not None
            events = [json.loads(process.stdout.readline()) for _ in range(3)]
            process.stdout.close()
            one.wait_done(job_id, 4)
            process.terminate()
            assert process.wait(40) == 0
            assert [event["event"] for event in events] == ["watching", "scale", "start"]
            assert not alive(events[2]["pid"])
            assert "drained" in (Path(one.settings.scratch_dir) / "worker-cpu0.log").read_text()
        finally:
            process.kill()


@pytest.mark.long
def test_workers_begin_to_drain_though_redis_hangs(system: Start, scale: Scale, tmp_path: Path) -> None:
    redis = OwnRedis(tmp_path / "redis")
    try:
        one = quick(system, redis_url=redis.url)
        scaler = scale(one, "--cpus", "1", "--min", "1")
        scaler.wait("serving")
        log = scaler.log.parent / "worker-cpu0.log"
        os.kill(redis.now.server.process.pid, signal.SIGSTOP)
        time.sleep(3)
        scaler.process.terminate()
        wait_until(lambda: '"stopping"' in log.read_text(), f"stopping: {log.read_text()}", 3)
        os.kill(redis.now.server.process.pid, signal.SIGCONT)
        assert scaler.stop() == 0
    finally:
        redis.stop()
