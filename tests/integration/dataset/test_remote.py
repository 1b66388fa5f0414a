"""`longhaul generate --submit` against the real system: Redis, API and a worker whose engine echoes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from jobs import client, dataset, keys, ports, stack, store_local
from jobs.dataset import calling, command
from worker.engine import tiny

ROOT = Path(__file__).parents[3]
ROWS = 30
PROGRAM = "from jobs import entry; entry.main()"
QUICK = {"LONGHAUL_MAX_RUNNING": "8", "LONGHAUL_FLUSH_SECONDS": "0.2", "LONGHAUL_POLL_SECONDS": "0.2"}
QUOTAS = {"small": {"open_requests": 10}}
Generate = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("model") / "echo")


def started(directory: Path, model: Path, **extra: str) -> stack.Stack:
    """Return a system in which eight requests take 0.1 s, not yet started."""
    served = {"echo": {"source": str(model), "engine": "echo", "faults": ["slow:0.1"]}}
    port = ports.take()
    return stack.Stack(directory, models=served, store="local", api_port=port, extra=QUICK | extra)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[str]:
    """A system that answers whoever is on this machine."""
    with started(tmp_path_factory.mktemp("open"), model) as running:
        yield running.api_url


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A system with keys, and those keys: of a tenant without and of one with a quota."""
    directory = tmp_path_factory.mktemp("locked")
    objects = store_local.LocalStore(directory / "objects")
    made = {tenant: keys.create(objects, tenant)[1] for tenant in ("large", "small")}
    quotas = orjson.dumps(QUOTAS).decode()
    with started(directory, model, LONGHAUL_QUOTAS=quotas) as running:
        yield running.api_url, made


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return written(tmp_path / "rows.jsonl", ROWS)


def written(path: Path, count: int) -> Path:
    path.write_bytes(b"".join(orjson.dumps({"id": n, "text": f"text {n}"}) + b"\n" for n in range(count)))
    return path


def arguments(rows: Path, output: Path, *more: str) -> list[str]:
    said = [str(rows), "-o", str(output), "--prompt", "Say {{ text }}", "--max-tokens", "12"]
    return [*said, *more] if "--model" in more else [*said, "--model", "echo", *more]


def generate(rows: Path, output: Path, *more: str) -> Result:
    return CliRunner().invoke(command.generate, arguments(rows, output, *more))


def process_of(rows: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    """Start the command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "generate", *arguments(rows, output, *more)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def table(output: Path) -> pa.Table:
    return pq.read_table(output / "data-00000.parquet")


def steps(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads((output / "summary.json").read_bytes())["steps"]["generate"]
    return found


def batches(url: str) -> Sequence[client.Batch]:
    with client.Client(url) as api:
        return api.batches(100)


def test_rows_and_columns_are_those_of_this_machines_engine(
    url: str, rows: Path, tmp_path: Path, model: Path
) -> None:
    before = len(batches(url))
    there = generate(rows, tmp_path / "there", "--submit", url, "--job-rows", "7")
    assert there.exit_code == 0, there.stderr
    assert len(batches(url)) - before == 5
    here = generate(rows, tmp_path / "here", "--model", str(model), "--engine", "echo")
    assert here.exit_code == 0, here.stderr
    remote, local = table(tmp_path / "there"), table(tmp_path / "here")
    assert remote.schema.equals(local.schema)
    # How long a request takes, and what of it was shared, are not the same there.
    same = [name for name in local.schema.names if name not in ("latency_seconds", "cached_tokens")]
    assert remote.select(same).equals(local.select(same))
    assert remote["latency_seconds"].null_count == 0


def test_the_same_command_again_asks_for_nothing(url: str, rows: Path, tmp_path: Path) -> None:
    assert generate(rows, tmp_path / "out", "--submit", url).exit_code == 0
    first, before = table(tmp_path / "out"), len(batches(url))
    assert generate(rows, tmp_path / "out", "--submit", url).exit_code == 0
    assert len(batches(url)) == before
    assert table(tmp_path / "out").equals(first)
    assert (steps(tmp_path / "out")["requests"], steps(tmp_path / "out")["resumed"]) == (0, ROWS)


def test_a_killed_client_goes_on_with_the_batches_it_had_made(url: str, tmp_path: Path) -> None:
    rows, output, before = written(tmp_path / "rows.jsonl", 400), tmp_path / "out", len(batches(url))
    process = process_of(rows, output, "--submit", url, "--job-rows", "100")
    deadline = time.monotonic() + 60
    while not (asked := batches(url)[: len(batches(url)) - before]) or not asked[-1].done:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    assert not (output / "data-00000.parquet").exists()

    assert generate(rows, output, "--submit", url, "--job-rows", "100").exit_code == 0
    assert len(batches(url)) - before == 4
    assert table(output)["id"].to_pylist() == list(range(400))


def test_a_cancelled_batch_leaves_its_rows_to_the_next_run(url: str, tmp_path: Path) -> None:
    rows, output = written(tmp_path / "rows.jsonl", 300), tmp_path / "out"
    process = process_of(rows, output, "--submit", url)
    try:
        deadline = time.monotonic() + 60
        while not (running := [batch for batch in batches(url) if batch.done and not batch.ended]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with client.Client(url) as api:
            api.cancel(running[0].id)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 3, said
    failed = pq.read_table(output / "errors.parquet")
    assert set(failed["code"].to_pylist()) == {"batch_cancelled"}
    assert 0 < failed.num_rows < 300
    assert sorted(table(output)["id"].to_pylist() + failed["row"].to_pylist()) == list(range(300))

    assert generate(rows, output, "--submit", url).exit_code == 0
    assert steps(output)["requests"] == failed.num_rows
    assert table(output)["id"].to_pylist() == list(range(300))
    assert not (output / "errors.parquet").exists()


def test_a_wrong_model_is_named_and_does_not_spoil_the_directory(
    url: str, rows: Path, tmp_path: Path
) -> None:
    wrong = generate(rows, tmp_path / "out", "--submit", url, "--model", "other")
    assert wrong.exit_code == 1
    assert "serves echo, not 'other'" in str(wrong.exception)
    right = generate(rows, tmp_path / "out", "--submit", url)
    assert right.exit_code == 0, right.exception
    assert table(tmp_path / "out").num_rows == ROWS


def test_a_server_that_is_not_there_is_named(
    free_port: int, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "_PATIENCE_SECONDS", 0.5)  # ten minutes, since a server may be restarting
    nowhere = f"http://127.0.0.1:{free_port}"
    result = generate(rows, tmp_path / "out", "--submit", nowhere)
    assert result.exit_code == 1
    assert isinstance(result.exception, client.ServerUnreachable)
    assert f"No usable answer from {nowhere}" in str(result.exception)
    assert f"{nowhere}: " in result.stderr
    assert "trying again" in result.stderr


def test_a_key_is_sent_and_never_written_down(
    locked: tuple[str, dict[str, str]], rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, made = locked
    without = generate(rows, tmp_path / "out", "--submit", url)
    assert without.exit_code == 1
    assert "LONGHAUL_API_KEY" in str(without.exception)
    monkeypatch.setattr(sys, "argv", ["longhaul", "generate", "--api-key", made["large"]])
    result = generate(rows, tmp_path / "out", "--submit", url, "--api-key", made["large"])
    assert result.exit_code == 0, result.exception
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or made["large"].encode() not in path.read_bytes(), path


def test_a_full_quota_is_told_and_smaller_jobs_get_through(
    locked: tuple[str, dict[str, str]], rows: Path, tmp_path: Path
) -> None:
    url, made = locked
    said = ("--submit", url, "--api-key", made["small"])
    refused = generate(rows, tmp_path / "out", *said)
    assert refused.exit_code == 1
    assert "quota" in str(refused.exception).lower()
    few = generate(rows, tmp_path / "few", *said, "--job-rows", "2")
    assert few.exit_code == 0, few.exception


def test_the_python_function_submits_too(url: str) -> None:
    given = pa.table({"text": ["one", "two"]})
    made = dataset.generate(
        given, model="echo", prompt="Say {{ text }}", max_tokens=12, samples=2, submit=url, quiet=True
    )
    assert made["text"].to_pylist() == ["one", "one", "two", "two"]
    assert made["sample"].to_pylist() == [0, 1, 0, 1]
    assert set(made["finish_reason"].to_pylist()) <= {"length", "stop"}


def test_rows_that_failed_are_asked_for_again(url: str, rows: Path, tmp_path: Path) -> None:
    """Each row asks for more than the model's context holds."""
    again = (rows, tmp_path / "out", "--submit", url, "--prompt", "{{ 'x' * 100000 }}{{ text }}")
    result = generate(*again)
    assert result.exit_code == 3, result.exception
    failed = pq.read_table(tmp_path / "out" / "errors.parquet")
    assert failed.num_rows == ROWS
    assert table(tmp_path / "out").num_rows == 0
    assert generate(*again).exit_code == 3
    assert steps(tmp_path / "out")["requests"] == ROWS
