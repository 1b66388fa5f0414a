"""A real API process: where it listens without keys, and what its log never holds."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from jobs import cli, keys, ports, servers, store_local
from tests.integration.api.serving import until

ROOT = Path(__file__).parents[3]
Start = Callable[..., "Running"]


class Running:
    """An API process, where it listens, and all that it has printed."""

    def __init__(self, server: servers.Server, port: int) -> None:
        self.server, self.port = server, port
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    @property
    def log(self) -> str:
        return self.server.output()


@pytest.fixture
def objects(tmp_path: Path) -> store_local.LocalStore:
    return store_local.LocalStore(tmp_path / "store")


@pytest.fixture
def start(tmp_path: Path, redis_url: str, objects: store_local.LocalStore) -> Iterator[Start]:
    """Start `python -m ...` as an API on a free port, and wait until it answers."""
    own = {"LONGHAUL_REDIS_URL": redis_url, "LONGHAUL_STORE_URL": objects.url, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:

        def begin(*command: str) -> Running:
            port = ports.take()
            line = [sys.executable, "-m", *command, "--port", str(port)]
            server = servers.Server("API", line, tmp_path / f"{port}.log", environment=os.environ | own)
            stack.callback(server.stop)
            running = Running(server, port)
            stack.callback(running.http.close)
            server.wait_ready(lambda: _answers(running), 60)
            return running

        yield begin


def _answers(running: Running) -> bool:
    try:
        return running.http.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def reached(port: int) -> bool:
    """Tell whether something listens on every address: 127.0.0.2 is one, and is not 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.2", port)) == 0


def test_without_a_key_it_listens_on_this_machine_alone_and_says_so_once(start: Start) -> None:
    running = start("api", "--host", "0.0.0.0")
    assert not reached(running.port)
    (line,) = [line for line in running.log.splitlines() if "longhaul keys create" in line]
    assert "127.0.0.1" in line
    assert "0.0.0.0" in line
    assert running.http.get("/v1/models").status_code == 200


def test_with_a_key_it_listens_where_it_is_told(start: Start, objects: store_local.LocalStore) -> None:
    keys.revoke(objects, keys.create(objects, "one")[0].id)
    running = start("api", "--host", "0.0.0.0")
    assert reached(running.port)
    assert "longhaul keys create" not in running.log
    assert running.http.get("/v1/models").status_code == 401


@pytest.mark.parametrize("command", [("api",), ("uvicorn", "api.app:app")])
def test_no_key_is_ever_in_the_log(
    start: Start, objects: store_local.LocalStore, command: tuple[str, ...]
) -> None:
    _, good = keys.create(objects, "one")
    gone, revoked = keys.create(objects, "one")
    keys.revoke(objects, gone.id)
    bad = good[:-8] + "deadbeef"
    running = start(*command)
    seen = []
    for key in (good, bad, revoked):
        for value in (f"Bearer {key}", f"bearer  {key}", key, f"Basic {key}", f"Bearer {key} {key}"):
            headers = {"Authorization": value}
            for path in ("/v1/models", "/v1/files/nope", "/v1/batches?limit=x", "/nope", "/v1/queue"):
                seen.append(running.http.get(path, headers=headers).status_code)
            seen.append(running.http.post("/v1/batches", content=b"{", headers=headers).status_code)
    objects.put(f"keys/{gone.id}.json", b"broken")
    with socket.create_connection(("127.0.0.1", running.port)) as raw:  # not HTTP
        raw.sendall(f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {good}\r\nbroken\r\n\r\n".encode())
        raw.recv(1000)
    assert set(seen) == {200, 400, 401, 404}
    assert running.server.running
    running.server.stop()
    assert running.log
    for key in (good, bad, revoked):
        assert key.rpartition("_")[2] not in running.log
        assert key.rpartition("_")[2][:16] not in running.log


def test_keys_made_by_the_command_open_the_api_until_they_are_revoked(
    start: Start, objects: store_local.LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_STORE_URL", objects.url)
    made = CliRunner().invoke(cli.main, ["keys", "create", "team"])
    running = start("api")
    headers = {"Authorization": f"Bearer {made.stdout.strip()}"}
    assert running.http.get("/v1/models", headers=headers).status_code == 200
    key_id = made.stdout.split("_")[1]
    assert CliRunner().invoke(cli.main, ["keys", "revoke", key_id]).exit_code == 0
    until(lambda: running.http.get("/v1/models", headers=headers).status_code == 401, 5)
