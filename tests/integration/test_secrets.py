"""What a real API and a real worker print and answer when things go wrong: never a secret."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jobs import embedded, ports
from tests.integration.celery_worker import celery, wait_until

REDIS_PASSWORD = "hunter2/Redis+Pass"
S3_SECRET = "wJalrXUtnFEMI/S3secret+Key"
TOKEN = "hf_TokenOfTheHub12345"
KEY = "lh_KeyOfAClient67890"
SESSION = 'AwsSessionToken"quoted\\'
SECRETS = (
    REDIS_PASSWORD,
    "hunter2",
    "Redis%2BPass",
    "Redis+Pass",
    S3_SECRET,
    "S3secret",
    TOKEN,
    KEY,
    "AwsSessionToken",
)
QUOTED = "hunter2%2FRedis%2BPass"
API = ("-m", "api", "--port")


def environment(directory: Path, **changes: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LONGHAUL_", "AWS_"))}
    made = {
        "LONGHAUL_STORE_URL": f"file://{directory / 'store'}",
        "LONGHAUL_S3_ACCESS_KEY_ID": "access",
        "LONGHAUL_S3_SECRET_ACCESS_KEY": S3_SECRET,
        "LONGHAUL_MODELS": json.dumps({"m": {"source": "nowhere", "engine": "echo"}}),
        "AWS_SESSION_TOKEN": SESSION,
        "HF_TOKEN": TOKEN,
        "PYTHONUNBUFFERED": "1",
    }
    return clean | made | changes


def silent(text: str) -> None:
    """Fail if a text holds a secret."""
    found = [secret for secret in SECRETS if secret in text]
    assert not found, text[:3000]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.RedisServer]:
    """A Redis that asks for a password."""
    directory = tmp_path_factory.mktemp("redis")
    running = embedded.RedisServer(directory / "data", directory / "redis.log")
    running.wait_ready()
    import redis

    with redis.Redis.from_url(running.url) as client:
        client.config_set("requirepass", REDIS_PASSWORD)
    yield running
    running.server.kill()


CASES = {
    "redis refuses": {"LONGHAUL_REDIS_URL": "redis://:WRONG@127.0.0.1:PORT/0"},
    "redis is away": {"LONGHAUL_REDIS_URL": "redis://:WRONG@127.0.0.1:1/0"},
    "redis has a bad port": {"LONGHAUL_REDIS_URL": "redis://:WRONG@127.0.0.1:port/0"},
    "redis has a password that is not quoted": {"LONGHAUL_REDIS_URL": f"redis://:{REDIS_PASSWORD}@h:1/0"},
    "redis has a password in the query": {"LONGHAUL_REDIS_URL": "redis://127.0.0.1:1/0?password=WRONG"},
    "redis has a bad scheme": {"LONGHAUL_REDIS_URL": "rediz://:WRONG@127.0.0.1:1/0"},
    "redis is no host": {"LONGHAUL_REDIS_URL": "redis://:WRONG@[::1/0"},
    "store is away": {
        "LONGHAUL_STORE_URL": "s3://b",
        "LONGHAUL_S3_ENDPOINT_URL": "http://u:WRONG@127.0.0.1:1",
    },
    "store has a bad scheme": {"LONGHAUL_STORE_URL": f"s4://access:{S3_SECRET}@b"},
    "store refuses": {"LONGHAUL_STORE_URL": "s3://b", "LONGHAUL_S3_ENDPOINT_URL": "S3"},
    "a setting is unknown": {"LONGHAUL_S3_SECRET": S3_SECRET},
    "a setting is wrong": {
        "LONGHAUL_S3_REGION": "",
        "LONGHAUL_LEASE_SECONDS": KEY,
        "LONGHAUL_MODELS": f'{{"{TOKEN}"',
    },
    "models are wrong": {"LONGHAUL_MODELS": json.dumps({"m": {"source": "x", "hf_token": TOKEN}})},
}


# A worker takes seconds to start, and reads its settings with the same code.
@pytest.mark.parametrize(
    ("program", "case"),
    [*(("api", case) for case in CASES), ("worker", "redis refuses"), ("worker", "store refuses")],
)
def test_a_start_that_fails_shows_no_secret(
    program: str, case: str, server: embedded.RedisServer, seaweedfs: embedded.SeaweedServer, tmp_path: Path
) -> None:
    ready = {"LONGHAUL_REDIS_URL": f"redis://:{QUOTED}@127.0.0.1:{server.port}/0"}
    changes = {
        name: value.replace("WRONG", QUOTED[:-1] if case == "redis refuses" else QUOTED)
        .replace("PORT", str(server.port))
        .replace("S3", seaweedfs.endpoint_url if value == "S3" else "S3")
        for name, value in CASES[case].items()
    }
    command = [sys.executable, *API, "0"] if program == "api" else celery("worker", app="worker")
    done = subprocess.run(
        command,
        env=environment(tmp_path, **(ready | changes)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    silent(done.stdout + done.stderr)
    assert "Traceback" not in done.stderr, done.stderr


def test_programs_that_run_into_faults_show_no_secret(server: embedded.RedisServer, tmp_path: Path) -> None:
    """Redis hangs, refuses and dies below an API and a worker that log all they can."""
    url = f"redis://:{QUOTED}@127.0.0.1:{server.port}/0"
    made = environment(tmp_path, LONGHAUL_REDIS_URL=url, LONGHAUL_REAP_SECONDS="0.3")
    port = ports.take()
    log = tmp_path / "log"
    answers: list[str] = []
    with log.open("wb") as out:
        programs = [
            subprocess.Popen(command, env=made, stdout=out, stderr=out)
            for command in (
                [sys.executable, *API, str(port)],
                celery("worker", "--loglevel", "DEBUG", app="worker"),
            )
        ]
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=20
        ) as http:
            wait_until(lambda: '"event": "ready"' in log.read_text() and _up(http), "ready", 60)

            def ask(most: int = 6) -> None:
                body = {"endpoint": "/v1/embeddings", "completion_window": "24h", "requests": [{}]}
                answers.append(http.post("/v1/batches", json=body).text)
                for path in ("/v1/batches", "/v1/queue", "/readyz", "/v1/files/x", "/metrics")[: most - 1]:
                    answers.append(http.get(path).text)

            ask()
            server.server.process.send_signal(signal.SIGSTOP)
            ask(2)
            server.server.process.send_signal(signal.SIGCONT)
            (tmp_path / "store").rename(tmp_path / "gone")
            (tmp_path / "store").write_text("no directory")
            ask()
            _other_password(server)
            ask()
            time.sleep(2)
            server.server.kill()
            ask()
            time.sleep(2)
    finally:
        for program in programs:
            program.send_signal(signal.SIGTERM)
        for program in programs:
            try:
                program.wait(20)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
    text = log.read_text()
    assert '"event": "settings"' in text
    assert "not reaped" in text
    silent(text)
    silent("\n".join(answers))


def _up(http: httpx.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def _other_password(server: embedded.RedisServer) -> None:
    """Let Redis refuse everybody who comes."""
    import redis

    with redis.Redis(port=server.port, password=REDIS_PASSWORD) as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)
