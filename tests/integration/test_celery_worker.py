"""The life of a worker: boots with no flags, answers while busy, stops on any signal, fails with one line."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from jobs import ids, queue
from tests.integration import celery_worker

Start = Callable[..., celery_worker.Worker]


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Start]:
    started: list[celery_worker.Worker] = []

    def begin(**changes: str) -> celery_worker.Worker:
        started.append(celery_worker.Worker(redis_url, tmp_path, **changes))
        return started[-1]

    yield begin
    for worker in started:
        worker.kill()


def test_consumes_control_and_its_model_with_no_flags(start: Start) -> None:
    worker = start().wait_ready()
    job = ids.batch_id()
    fingerprint = worker.settings.fingerprints["m/x.y"]
    worker.send(queue.PLAN, job)
    worker.send(queue.FEED, job)
    worker.send(queue.FINALIZE, job)
    worker.send(queue.WAKE, fingerprint)
    for event in (f"plan {job}", f"feed {job}", f"finalize {job}", "wake"):
        worker.wait_event(event, 5)
    assert set(worker.inspect("active_queues")[0]) >= {"name"}
    names = {found["name"] for found in worker.inspect("active_queues")}
    assert names == {"control", queue.model_queue(fingerprint)}


def test_serves_control_alone_when_the_model_is_none(start: Start) -> None:
    worker = start(LONGHAUL_MODEL="none").wait_ready()
    assert [found["name"] for found in worker.inspect("active_queues")] == ["control"]


def test_answers_ping_and_inspect_engine_while_the_engine_runs(start: Start) -> None:
    worker = start().wait_ready()
    worker.wait_event("started")
    first = worker.inspect("engine")["steps"]
    assert worker.inspect("engine")["steps"] > first
    assert worker.inspect("ping") == {"ok": "pong"}


def test_two_workers_of_one_machine_answer_by_names_of_their_own(start: Start) -> None:
    for worker in [start().wait_ready(), start().wait_ready()]:
        assert worker.inspect("ping") == {"ok": "pong"}


def test_answers_and_stops_while_the_model_loads(start: Start) -> None:
    worker = start(FAKE_LOAD="60").wait_ready()
    assert worker.inspect("engine") == {"state": "loading", "steps": 0}
    worker.signal()
    assert worker.exit_code(6) == 0


@pytest.mark.parametrize("drain", ["0", "2"])
def test_sigterm_drains_and_ends_with_success(start: Start, drain: str) -> None:
    worker = start(FAKE_DRAIN=drain).wait_ready()
    worker.wait_event("started")
    worker.signal()
    assert worker.exit_code(float(drain) + 4) == 0, worker.log
    assert worker.events[-2:] == ["begin_stop", "drained"]
    assert worker.plain_lines == []
    assert "Traceback" not in worker.log


def test_more_signals_while_draining_change_nothing(start: Start) -> None:
    worker = start(FAKE_DRAIN="2").wait_ready()
    worker.wait_event("started")
    worker.signal()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGINT):
        time.sleep(0.2)
        worker.signal(number)
    assert worker.exit_code(6) == 0, worker.log
    assert worker.events[-2:] == ["begin_stop", "drained"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_ctrl_c_and_sigquit_drain_as_sigterm_does(start: Start, number: int) -> None:
    worker = start(FAKE_DRAIN="1").wait_ready()
    worker.wait_event("started")
    worker.signal(number)
    assert worker.exit_code(5) == 0, worker.log
    assert worker.events[-1] == "drained"


def test_remote_shutdown_drains(start: Start) -> None:
    worker = start(FAKE_DRAIN="1").wait_ready()
    worker.wait_event("started")
    subprocess.run(
        celery_worker.celery("control", "shutdown"), env=worker.environment, capture_output=True, timeout=30
    )
    assert worker.exit_code(5) == 0, worker.log
    assert worker.events[-1] == "drained"


def test_ends_when_the_drain_limit_is_over(start: Start) -> None:
    worker = start(FAKE_DRAIN="60", LONGHAUL_DRAIN_SECONDS="0.5").wait_ready()
    worker.wait_event("started")
    worker.signal()
    assert worker.exit_code(12) == 1


def test_a_model_that_cannot_load_ends_the_worker_with_one_line(start: Start) -> None:
    worker = start(FAKE_FAILS="no such file", FAKE_LOAD="1")
    assert worker.exit_code(20) == 1
    assert worker.plain_lines == [
        "longhaul: Model 'm' cannot be loaded from 'nowhere': no such file. Check LONGHAUL_MODELS."
    ]
    assert "Traceback" not in worker.log


def test_the_real_service_starts_answers_and_stops(start: Start) -> None:
    worker = start(app="worker", LONGHAUL_MODEL="none").wait_ready()
    assert worker.inspect("engine")["state"] == "serving"
    worker.signal()
    assert worker.exit_code(8) == 0, worker.log
    assert worker.plain_lines == []


def _refusal(directory: Path, redis_url: str, **changes: str) -> str:
    """Run a worker that cannot start; return the one plain line it prints."""
    done = subprocess.run(
        celery_worker.celery("worker"),
        env=celery_worker.environment(redis_url, directory, **changes),
        capture_output=True,
        text=True,
        timeout=15,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    plain = [line for line in (done.stdout + done.stderr).splitlines() if line and not line.startswith("{")]
    assert len(plain) == 1, plain
    return plain[0]


def test_missing_redis_is_named(tmp_path: Path, free_port: int) -> None:
    line = _refusal(tmp_path, f"redis://:geheim@127.0.0.1:{free_port}/0")
    assert "LONGHAUL_REDIS_URL" in line
    assert "geheim" not in line


def test_wrong_settings_are_named(tmp_path: Path, redis_url: str) -> None:
    assert "LONGHAUL_LEASE_SECONDS" in _refusal(tmp_path, redis_url, LONGHAUL_LEASE_SECONDS="-1")
    assert "LONGHAUL_LEESE is not a setting" in _refusal(tmp_path, redis_url, LONGHAUL_LEESE="1")
    assert "LONGHAUL_MODEL" in _refusal(tmp_path, redis_url, LONGHAUL_MODEL="other")
    assert "LONGHAUL_MODELS" in _refusal(tmp_path, redis_url, LONGHAUL_MODELS="{}")


def test_a_chat_template_that_is_none_is_named(tmp_path: Path, redis_url: str) -> None:
    template = tmp_path / "own.jinja"
    models = orjson.dumps({"m": {"source": "any/model", "chat_template": str(template)}}).decode()
    assert f"{template} cannot be read: No such file" in _refusal(tmp_path, redis_url, LONGHAUL_MODELS=models)
    template.write_text("{% for message in messages %}\n{% if %}")
    assert f"{template} is wrong in line 2" in _refusal(tmp_path, redis_url, LONGHAUL_MODELS=models)


def test_store_that_cannot_be_used_is_named(tmp_path: Path, redis_url: str, free_port: int) -> None:
    line = _refusal(
        tmp_path,
        redis_url,
        LONGHAUL_STORE_URL="s3://bucket",
        LONGHAUL_S3_ENDPOINT_URL=f"http://127.0.0.1:{free_port}",
        LONGHAUL_S3_ACCESS_KEY_ID="a",
        LONGHAUL_S3_SECRET_ACCESS_KEY="geheim",
    )
    assert "LONGHAUL_STORE_URL" in line


def test_secrets_are_masked_in_the_log(start: Start) -> None:
    worker = start(LONGHAUL_S3_SECRET_ACCESS_KEY="geheim").wait_ready()
    assert "geheim" not in worker.log
