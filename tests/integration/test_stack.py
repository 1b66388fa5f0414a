"""`longhaul up` as a process tree: it works, it resumes, and whatever ends it leaves nothing running."""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from jobs import cli, ports, servers, stack
from tests.integration.api.serving import until
from tests.integration.test_servers import ended
from worker.engine import smollm2


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """A model whose requests are echoed; its tokenizer is real."""
    return {"echo": {"source": str(smollm2.ensure()), "engine": "echo"}}


def children(pid: int) -> list[int]:
    """The process ids of the direct children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def run_batch(url: str, texts: list[str]) -> dict[str, Any]:
    """Run a batch of inline requests to its end."""
    requests = [
        {
            "custom_id": f"row-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "echo", "prompt": text, "max_tokens": 4},
        }
        for index, text in enumerate(texts)
    ]
    body = {"requests": requests, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: dict[str, Any] = httpx.post(f"{url}/v1/batches", json=body, timeout=30).raise_for_status().json()
    deadline = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = httpx.get(f"{url}/v1/batches/{batch['id']}").raise_for_status().json()
    return batch


def content(url: str, file_id: str) -> str:
    return httpx.get(f"{url}/v1/files/{file_id}/content").raise_for_status().text


@contextmanager
def up(directory: Path, models: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """`longhaul up` in a process of its own, until it says where the API is."""
    command = [
        sys.executable,
        "-m",
        "jobs.cli",
        "up",
        "--dir",
        str(directory),
        "--port",
        str(ports.take()),
    ]
    environment = os.environ | {"LONGHAUL_MODELS": stack.models_json(models)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_started(process: subprocess.Popen[str]) -> str:
    """Return the API's URL, read from what `longhaul up` prints."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if found := re.search(r"LONGHAUL_API_URL=(\S+)", line):
            return found[1]
    raise AssertionError(seen)


def test_a_batch_runs_and_its_files_are_there_after_a_restart(tmp_path: Path, models: dict[str, Any]) -> None:
    with stack.Stack(tmp_path, models=models, api_port=ports.take()) as first:
        batch = run_batch(first.api_url, ["to be or not to be", "that is the question"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        output = content(first.api_url, batch["output_file_id"])
        with pytest.raises(stack.AlreadyRunning, match=f"pid {os.getpid()}"):
            stack.Stack(tmp_path, models=models).start()
        assert (tmp_path / "environment").exists()
    with stack.Stack(tmp_path, models=models, workers=0, api_port=ports.take()) as second:
        assert content(second.api_url, batch["output_file_id"]) == output
        listed = httpx.get(f"{second.api_url}/v1/batches").json()["data"]
        assert [one["id"] for one in listed] == [batch["id"]]


def test_a_key_made_for_it_is_asked_for(tmp_path: Path, models: dict[str, Any]) -> None:
    with stack.Stack(tmp_path, models=models, workers=0, api_port=ports.take()) as running:
        url = f"{running.api_url}/v1/models"
        assert httpx.get(url).status_code == 200
        key = CliRunner().invoke(cli.main, ["keys", "create", "team", "--dir", str(tmp_path)]).stdout.strip()
        until(lambda: httpx.get(url).status_code == 401, 5)
        assert httpx.get(url, headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_a_worker_that_dies_is_replaced(tmp_path: Path, models: dict[str, Any]) -> None:
    with stack.Stack(tmp_path, models=models, store="local", api_port=ports.take()) as running:
        running.workers[0].kill()
        assert running.poll() == ["worker 1 ended with exit status -9; started another."]
        assert run_batch(running.api_url, ["once more"])["status"] == "completed"
        assert running.poll() == []


def test_workers_that_a_request_kills_come_back_until_it_is_given_up(
    tmp_path: Path, models: dict[str, Any]
) -> None:
    poison = {"echo": models["echo"] | {"faults": ["break:poison"]}}
    short = {"LEASE": "1", "HEARTBEAT": "0.3", "REAP": "0.5"}
    extra = {f"LONGHAUL_{name}_SECONDS": value for name, value in short.items()}
    port = ports.take()
    with stack.Stack(tmp_path, models=poison, store="local", api_port=port, extra=extra) as running:
        said: list[str] = []
        stopping = threading.Event()

        def look() -> None:
            while not stopping.wait(0.2):
                said.extend(running.poll())

        # Here, not in the pool: a thread that starts a worker must live as long as it.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            batch = pool.submit(run_batch, running.api_url, ["fine", "the poison", "fine too"])
            batch.add_done_callback(lambda _: stopping.set())
            look()
        counts = batch.result()["request_counts"]
    assert counts == {"total": 3, "completed": 2, "failed": 1}
    assert [re.sub(r" Its last.*", "", line) for line in said] == [
        "worker 1 ended with exit status 1; started another.",
        "worker 1 ended with exit status 1; another starts in 1 s.",
        "worker 1 ended with exit status 1; another starts in 2 s.",
        "worker 1 ended with exit status 1; another starts in 4 s.",
    ]


def test_a_worker_that_cannot_run_ends_the_stack_with_its_own_words(tmp_path: Path) -> None:
    models = {"absent": {"source": str(tmp_path / "nothing-here")}}
    with (
        stack.Stack(tmp_path / "data", models=models, store="local", api_port=ports.take()) as running,
        pytest.raises(servers.ServerFailed, match=r"(?s)worker 1 ended.*LONGHAUL_MODELS"),
    ):
        running.wait()


def test_a_taken_port_is_named_and_nothing_is_left(tmp_path: Path, models: dict[str, Any]) -> None:
    before = children(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(servers.ServerFailed, match=r"(?s)API ended at start.*address already in use"):
            stack.Stack(tmp_path, models=models, store="local", api_port=port).start()
    assert children(os.getpid()) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_of_it(tmp_path: Path, models: dict[str, Any], number: signal.Signals) -> None:
    with up(tmp_path, models) as process:
        url = wait_started(process)
        started = children(process.pid)
        assert httpx.get(f"{url}/healthz").status_code == 200
        process.send_signal(number)
        assert process.wait(40) == 0
    assert len(started) == 4
    assert all(ended(child, 0.1) for child in started)


def test_a_signal_while_it_starts_stops_what_was_started(tmp_path: Path, models: dict[str, Any]) -> None:
    with up(tmp_path, models) as process:
        while len(children(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) in (0, 130)
    assert all(ended(child, 0.1) for child in started)


def test_kill_9_leaves_nothing_running(tmp_path: Path, models: dict[str, Any]) -> None:
    with up(tmp_path, models) as process:
        wait_started(process)
        started = children(process.pid)
        process.kill()
    assert len(started) == 4
    assert all(ended(child) for child in started)
