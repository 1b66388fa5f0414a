"""What the system itself costs: requests per second through API, plan, ledger and store; the engine echoes.

Each line is a HumanEval prompt behind a system message of about 300 tokens. The servers are real (Redis,
SeaweedFS, the API, one worker that also plans). The planner's peak memory is that of a process that does
nothing else.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import httpx

from bench import humaneval
from jobs.ledger import Job, Ledger
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from jobs.stack import Stack
from worker.engine import smollm2

SYSTEM_WORDS = 280
MODEL = "echo"

_PLAN_ALONE = """
import resource, sys, time
from pathlib import Path
from jobs import plan, tokens
from jobs.records import JobRecord
from jobs.settings import Settings
from jobs.store_local import LocalStore

class Sink:
    def begin(self, total, model): pass
    def refuse(self, rows): pass
    def release(self, shards, planned, tokens): pass

folder = Path(sys.argv[1])
settings = Settings.load()
record = JobRecord("batch_0", "default", "/v1/chat/completions", "f", "input.jsonl", "24h", 0.0, 1e12)
tokenizer = tokens.cached("%(model)s", settings.models["%(model)s"])
started = time.perf_counter()
plan.Planner(record, settings, LocalStore(folder), lambda name: tokenizer, "plan/").plan(Sink())
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@click.command()
@click.option("--lines", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line and nothing else.")
def main(lines: int, as_json: bool) -> None:
    """Measure the system's own cost with LINES requests."""
    models = {MODEL: ModelSettings(source=str(smollm2.ensure()), engine="echo")}
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-") as folder:
        source = Path(folder) / "input.jsonl"
        humaneval.write(source, lines, MODEL, max_tokens=64, system=humaneval.system_message(SYSTEM_WORDS))
        result = {"lines": lines} | _through_the_system(source, lines, models, Path(folder))
        planner_seconds, planner_bytes = _plan_alone(Path(folder), models)
    result["peak_bytes"]["planner"] = planner_bytes
    result["planner_alone_per_second"] = round(lines / planner_seconds, 1)
    click.echo(json.dumps(result) if as_json else json.dumps(result, indent=2))


def _through_the_system(
    source: Path, lines: int, models: dict[str, ModelSettings], folder: Path
) -> dict[str, Any]:
    # A first job of one line: what is measured is a worker that has loaded what it plans with.
    first = folder / "first.jsonl"
    humaneval.write(first, 1, MODEL, max_tokens=1, system="Warm up.")
    with Stack(folder / "stack", models=models) as stack, httpx.Client(base_url=stack.api_url) as api:
        api.timeout = httpx.Timeout(120)
        environment = {name.removeprefix("LONGHAUL_").lower(): v for name, v in stack.environment.items()}
        ledger = Ledger.connect(Settings.load(redis_url=environment["redis_url"]))
        _run(first, api, ledger)
        started, job = _run(source, api, ledger)
        if job.completed != lines:
            raise click.ClickException(f"{job.completed} of {lines} requests completed ({job.state}).")
        assert stack.api is not None
        processes = {"api": stack.api.process.pid, "worker": stack.workers[0].process.pid}
        return {
            "planned_per_second": round(lines / (job.times["in_progress_at"] - started), 1),
            "completed_per_second": round(lines / (job.times["completed_at"] - started), 1),
            "seconds": round(job.times["completed_at"] - started, 2),
            "peak_bytes": {name: _peak_bytes(pid) for name, pid in processes.items()},
        }


def _run(source: Path, api: httpx.Client, ledger: Ledger) -> tuple[float, Job]:
    """Upload a file, then run it; return when its batch was created (unix seconds) and how it ended."""
    with source.open("rb") as stream:
        answer = api.post("/v1/files", files={"file": stream}, data={"purpose": "batch"})
    body = {
        "input_file_id": answer.raise_for_status().json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    started = time.time()
    job_id = api.post("/v1/batches", json=body).raise_for_status().json()["id"]
    while (job := ledger.job(job_id)) is None or not job.state.terminal:
        time.sleep(0.1)
    return started, job


def _plan_alone(folder: Path, models: dict[str, ModelSettings]) -> tuple[float, int]:
    """Plan the input in a process of its own; return its seconds and its peak of resident memory."""
    import os

    from jobs import stack

    environment = os.environ | {"LONGHAUL_MODELS": stack.models_json(models)}
    command = [sys.executable, "-c", _PLAN_ALONE % {"model": MODEL}, str(folder)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    seconds, peak = output.split()
    return float(seconds), int(peak)


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
