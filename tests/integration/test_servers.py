"""The servers the tests and `longhaul up` run on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from jobs import embedded, servers

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def ended(pid: int, seconds: float = 5) -> bool:
    """Whether the process is gone (or a zombie) within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_redis_keeps_everything_and_evicts_nothing(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.dbsize() == 0


def test_redis_resumes_on_another_port_after_a_kill(tmp_path: Path) -> None:
    first = embedded.RedisServer(tmp_path / "data", tmp_path / "log")
    first.wait_ready()
    with redis.Redis.from_url(first.url) as client:
        client.set("kept", "yes")
        client.waitaof(1, 0, 1000) if client.info()["redis_version"] >= "7.2" else time.sleep(1.2)
    first.server.kill()
    second = embedded.RedisServer(tmp_path / "data", tmp_path / "log")
    try:
        second.wait_ready()
        with redis.Redis.from_url(second.url, decode_responses=True) as client:
            assert client.get("kept") == "yes"
    finally:
        second.server.stop()


def test_bucket_takes_data_when_seaweedfs_is_ready(seaweedfs: embedded.SeaweedServer) -> None:
    client = seaweedfs._client
    client.put_object(Bucket=seaweedfs.bucket, Key="tests/ready", Body=b"x")
    assert client.get_object(Bucket=seaweedfs.bucket, Key="tests/ready")["Body"].read() == b"x"


def test_a_server_that_ends_at_start_shows_its_last_lines(tmp_path: Path) -> None:
    server = servers.Server("Thing", [sys.executable, "-c", "print('no disk'); exit(3)"], tmp_path / "log")
    with pytest.raises(servers.ServerFailed, match=r"(?s)Thing ended at start with exit status 3.*no disk"):
        server.wait_ready(lambda: False, 10)


def test_a_server_that_never_answers_is_an_error(tmp_path: Path) -> None:
    server = servers.Server("Thing", SLEEP, tmp_path / "log")
    with pytest.raises(servers.ServerFailed, match="Thing is not ready after 0 s"):
        server.wait_ready(lambda: False, 0.2)
    server.stop()
    assert not server.running


def test_who_waits_for_long_is_told_for_what_and_at_the_end_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "TELL_SECONDS", 0.1)
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    (tmp_path / "log").write_text("of the run before\n")
    code = [sys.executable, "-c", "import time; time.sleep(60)"]
    server, told = servers.Server("Thing", code, tmp_path / "log"), list[str]()
    with pytest.raises(servers.ServerFailed, match=r"has logged nothing yet\. This machine is busy"):
        server.wait_ready(lambda: False, 0.5, told.append)
    server.stop()
    assert told == [f"Still waiting for Thing to be ready, 0 s in all; its log: {tmp_path}/log"]


def test_stop_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    server = servers.Server("Thing", [sys.executable, "-c", deaf], tmp_path / "log", stop_seconds=0.2)
    server.wait_ready(lambda: "up" in server.tail(), 10)
    server.stop()
    assert server.process.returncode == -signal.SIGKILL


def test_kill_9_of_the_parent_leaves_nothing_running(tmp_path: Path) -> None:
    parent = (
        "import pathlib, sys, time; from jobs import servers;"
        f"s = servers.Server('Thing', {SLEEP!r}, pathlib.Path(sys.argv[1]));"
        "s.wait_ready(lambda: 'up' in s.tail(), 10); print(s.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    assert ended(child)
