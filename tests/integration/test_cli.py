"""The `longhaul` command against the real system: Redis, API and a worker whose engine echoes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from jobs import cli, ids, places, ports, stack, store_local
from jobs.records import JobRecord
from worker.engine import tiny

LINES = 40
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running system in which five steps take a second, eight requests each."""
    directory = tmp_path_factory.mktemp("stack")
    model = {
        "source": str(tiny.tiny_model(directory / "model")),
        "engine": "echo",
        "faults": ["slow:0.2"],
    }
    extra = {"LONGHAUL_MAX_RUNNING": "8", "LONGHAUL_FLUSH_SECONDS": "0.2", "LONGHAUL_POLL_SECONDS": "0.2"}
    with stack.Stack(
        directory / "data", models={"echo": model}, store="local", api_port=ports.take(), extra=extra
    ) as running:
        yield running.api_url


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """A file whose last request is refused for its parameters."""
    return written(tmp_path / "prompts.jsonl", LINES)


def written(path: Path, lines: int) -> str:
    path.write_bytes(b"".join(line(f"r{i}", 0 if i == lines - 1 else 4) for i in range(lines)))
    return str(path)


def line(custom_id: str, max_tokens: int) -> bytes:
    body = {"model": "echo", "prompt": f"prompt of {custom_id}", "max_tokens": max_tokens}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return orjson.dumps(request) + b"\n"


@pytest.fixture
def run(url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("LONGHAUL_API_URL", url)

    def invoke(*arguments: str, **options: object) -> Result:
        return CliRunner().invoke(cli.main, arguments, **options)

    return invoke


def custom_ids(data: bytes) -> list[str]:
    return [orjson.loads(line)["custom_id"] for line in data.splitlines()]


def test_life_of_a_job(run: Run, prompts: str, tmp_path: Path) -> None:
    submitted = run("submit", prompts, "--watch")
    assert submitted.exit_code == 3
    job_id, report = submitted.stdout.splitlines()[:2]
    assert f"{LINES - 1} completed, 1 failed of {LINES}" in report

    assert run("status", job_id).exit_code == 3
    assert job_id in run("list").stdout
    assert custom_ids(run("results", job_id).stdout_bytes) == [f"r{i}" for i in range(LINES - 1)]
    assert run("results", job_id, "-o", f"{tmp_path}/new/").exit_code == 3
    made = places.of_job(tmp_path / "new" / f"{job_id}.jsonl")
    assert set(made.values()) == set((tmp_path / "new").iterdir())
    assert custom_ids(made["errors"].read_bytes()) == [f"r{LINES - 1}"]
    assert len(custom_ids(made["metrics"].read_bytes())) == LINES - 1
    assert orjson.loads(made["summary"].read_bytes())["counts"]["total"] == LINES

    refused = run("cancel", job_id)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("longhaul: ")


def test_follow_gives_every_line_once_while_the_job_runs(run: Run, prompts: str, tmp_path: Path) -> None:
    job_id = run("submit", prompts).stdout.strip()
    assert run("results", job_id).exit_code == 1
    assert run("results", job_id, "--follow", "-o", f"{tmp_path}/").exit_code == 3
    written = (tmp_path / f"{job_id}.jsonl").read_bytes()
    assert sorted(custom_ids(written)) == sorted(f"r{i}" for i in range(LINES - 1))
    assert custom_ids((tmp_path / f"{job_id}.errors.jsonl").read_bytes()) == [f"r{LINES - 1}"]


def test_same_key_twice_is_one_job(run: Run, prompts: str) -> None:
    first, second = (run("submit", prompts, "--idempotency-key", "once").stdout for _ in range(2))
    assert first == second != ""


def test_cancelled_job_keeps_what_has_finished(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"".join(line(f"r{i}", 4) for i in range(400)))
    job_id = run("submit", str(path)).stdout.strip()
    deadline = time.monotonic() + 30
    while orjson.loads(run("status", job_id, "--json").stdout)["request_counts"]["completed"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert run("cancel", job_id).stdout.split() == [job_id, "cancelling"]
    assert run("watch", job_id).exit_code == 4
    kept, errors = (custom_ids(run("results", job_id, *flags).stdout_bytes) for flags in ([], ["--errors"]))
    assert kept
    assert errors
    assert sorted(kept + errors) == sorted(f"r{i}" for i in range(400))


def test_job_with_broken_lines_fails_and_shows_them(run: Run) -> None:
    result = run(
        "submit", "-", "--watch", input=b'{}\n{"custom_id"\n\n' + line("a", 4).replace(b"echo", b"other")
    )
    assert result.exit_code == 4
    for number in (1, 2, 4):
        assert f"line {number}: " in result.stdout


def test_recover_brings_back_what_redis_lost(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_REDIS_URL", redis_url)
    monkeypatch.setenv("LONGHAUL_STORE_URL", f"file://{tmp_path}")
    record = JobRecord(ids.batch_id(), "default", "/v1/completions", "file-1", "files/1", "24h", 1.0, 1e12)
    objects = store_local.LocalStore(tmp_path)
    objects.put(f"jobs/{record.id}/job.json", record.to_json())
    objects.put(f"open/{record.id}", b"")
    for printed in (f"{record.id}\n", ""):
        result = CliRunner().invoke(cli.main, ["recover"])
        assert (result.exit_code, result.stdout) == (0, printed)


def test_recover_without_redis_names_the_setting(
    free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_STORE_URL", f"file://{tmp_path}")
    monkeypatch.setenv("LONGHAUL_REDIS_URL", f"redis://127.0.0.1:{free_port}/0")
    result = CliRunner().invoke(cli.main, ["recover"])
    assert result.exit_code == 1
    assert "LONGHAUL_REDIS_URL" in result.stderr


def test_python_of_the_readme_works_as_it_stands(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (request,) = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("examples").mkdir()
    Path("examples/prompts.jsonl").write_text(request.replace('"smol"', '"echo"'))
    exec(program.replace("http://127.0.0.1:8000", url), {})
    assert custom_ids(capsys.readouterr().out.strip().encode()) == ["a"]


def test_ctrl_c_leaves_the_job_running(run: Run, url: str, tmp_path: Path) -> None:
    # Enough that it still runs when the command, which may start slowly, is interrupted.
    job_id = run("submit", written(tmp_path / "many.jsonl", 5 * LINES)).stdout.strip()
    watching = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "watch", job_id],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"LONGHAUL_API_URL": url, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert watching.stderr
    shown = watching.stderr.readline()
    watching.send_signal(signal.SIGINT)
    _, rest = watching.communicate(timeout=10)
    assert watching.returncode == 130, shown + rest
    assert f"longhaul watch {job_id}" in rest
    assert run("watch", job_id).exit_code == 3
