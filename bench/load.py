"""A large job while workers are killed: one of four every ten seconds, each replaced by a new one.

The servers are real (Redis, SeaweedFS, the API), the engines echo 64 prompts of HumanEval a step. One JSON
line per figure is printed; the exit code is 1 when a row was lost or doubled.
"""

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
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

MODEL = "echo"
SYSTEM_WORDS = 280


@click.command()
@click.option("--lines", type=click.IntRange(min=1), default=50_000, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--kill-seconds", type=float, default=10, show_default=True, help="Time between two kills.")
@click.option("--step-seconds", type=float, default=0.5, show_default=True, help="How long a step is.")
@click.option("--lease-seconds", type=float, default=30, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Decides which worker is killed.")
def main(
    lines: int, workers: int, kill_seconds: float, step_seconds: float, lease_seconds: float, seed: int
) -> None:
    """Run LINES requests while workers are killed, and count what that cost."""
    with tempfile.TemporaryDirectory(prefix="longhaul-load-") as name:
        folder = Path(name)
        source, trace = folder / "input.jsonl", folder / "computed"
        humaneval.write(source, lines, MODEL, max_tokens=64, system=humaneval.system_message(SYSTEM_WORDS))
        faults = (f"slow:{step_seconds}", f"trace:{trace}")
        models = {MODEL: ModelSettings(source=str(smollm2.ensure()), engine="echo", faults=faults)}
        extra = {"LONGHAUL_LEASE_SECONDS": str(lease_seconds)}
        with (
            Stack(folder / "stack", models=models, workers=workers, extra=extra) as stack,
            httpx.Client(base_url=stack.api_url, timeout=300) as api,
        ):
            load = Load(stack, models[MODEL].fingerprint(MODEL), random.Random(seed))
            job_id = _submit(source, api)
            job = load.run(job_id, kill_seconds)
            found = _custom_ids(job_id, api)
        wanted = [each["custom_id"] for each in map(json.loads, source.read_text().splitlines())]
        computed = Counter(trace.read_text().split())
    lost = sum(name not in found for name in wanted)
    doubled = found.total() - len(found)
    seconds = job.times[f"{job.state}_at"] - job.times["created_at"]
    figures = {
        "lines": lines,
        "state": str(job.state),
        "seconds": round(seconds, 1),
        "completed_per_second": round(job.completed / seconds, 1),
        "kills": load.kills,
        "lost": lost,
        "doubled": doubled,
        "recomputed": computed.total() - len(computed),
        "worst_seconds_to_take_over": round(max(load.took_over, default=0.0), 1),
        "worst_seconds_until_done": round(max(load.took, default=0.0), 1),
        **{f"peak_{what}_bytes": size for what, size in load.peaks.items()},
    }
    for figure, value in figures.items():
        click.echo(json.dumps({"figure": figure, "value": value}))
    sys.exit(int(bool(lost or doubled or job.completed != lines)))


class Load:
    """Kills workers of a stack while a job runs; measures what becomes of all that was leased then.

    A request is taken over when somebody else owns it, or it is done: it may be killed again in between.
    """

    def __init__(self, stack: Stack, fingerprint: str, chance: random.Random) -> None:
        self.kills = 0
        self.took_over: list[float] = []
        self.took: list[float] = []
        self.peaks: dict[str, int] = {"worker": 0, "api": 0, "redis": 0}
        self._stack, self._random = stack, chance
        url = stack.environment["LONGHAUL_REDIS_URL"]
        self._ledger = Ledger.connect(Settings(redis_url=url))
        self._owners = f"{{{Settings().namespace}}}:owners:{fingerprint}"
        self._orphans: list[tuple[float, dict[int, str]]] = []
        self._waiting: list[tuple[float, dict[int, str]]] = []

    def run(self, job_id: str, kill_seconds: float) -> Job:
        """Kill until the job has ended; return it."""
        next_kill = time.monotonic() + kill_seconds
        while (job := self._ledger.job(job_id)) is None or not job.state.terminal:
            self._look(job_id)
            if time.monotonic() >= next_kill:
                next_kill += kill_seconds
                self._kill_one()
            time.sleep(0.2)
        self._note(self._orphans, self.took_over, lambda row, token: True)
        self._note(self._waiting, self.took, lambda row, token: True)
        return job

    def _kill_one(self) -> None:
        victim = self._random.choice(self._stack.workers)
        held = self._held()
        victim.kill()
        for waiting in (self._orphans, self._waiting):
            waiting.append((time.monotonic(), dict(held)))
        self.kills += 1
        self._stack.workers.remove(victim)
        self._stack.start_worker()

    def _look(self, job_id: str) -> None:
        held, done = self._held(), self._ledger.done(job_id)

        def is_done(row: int, token: str) -> bool:
            return len(done) > row // 8 and done[row // 8] >> (7 - row % 8) & 1 == 1

        def is_taken_over(row: int, token: str) -> bool:
            return held.get(row, token) != token or is_done(row, token)

        self._note(self._orphans, self.took_over, is_taken_over)
        self._note(self._waiting, self.took, is_done)
        for what, size in self._sizes():
            self.peaks[what] = max(self.peaks[what], size)

    def _held(self) -> dict[int, str]:
        """Return the token that owns each leased row."""
        owners: Any = self._ledger.redis.hgetall(self._owners)
        return {int(name.rpartition(b":")[2]): value.decode().split("|")[0] for name, value in owners.items()}

    def _note(self, waiting: list[Any], took: list[float], over: Callable[[int, str], bool]) -> None:
        """Strike out what is over; note how long it was since the kill, where that was the last."""
        for killed, rows in waiting:
            for row in [row for row, token in rows.items() if over(row, token)]:
                del rows[row]
            if not rows:
                took.append(time.monotonic() - killed)
        waiting[:] = [each for each in waiting if each[1]]

    def _sizes(self) -> Iterator[tuple[str, int]]:
        assert self._stack.api is not None
        assert self._stack.redis is not None
        yield "api", _peak_bytes(self._stack.api.process.pid)
        for worker in self._stack.workers:
            yield "worker", _peak_bytes(worker.process.pid)
        yield "redis", _peak_bytes(self._stack.redis.server.process.pid)


def _submit(source: Path, api: httpx.Client) -> str:
    with source.open("rb") as stream:
        answer = api.post("/v1/files", files={"file": stream}, data={"purpose": "batch"})
    body = {
        "input_file_id": answer.raise_for_status().json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    return str(api.post("/v1/batches", json=body).raise_for_status().json()["id"])


def _custom_ids(job_id: str, api: httpx.Client) -> Counter[str]:
    """Count the custom_ids over the output and the errors of a job."""
    batch = api.get(f"/v1/batches/{job_id}").raise_for_status().json()
    found: Counter[str] = Counter()
    for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        text = api.get(f"/v1/files/{file_id}/content").raise_for_status().text
        found.update(json.loads(line)["custom_id"] for line in text.splitlines())
    return found


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (FileNotFoundError, IndexError):  # it has ended
        return 0


if __name__ == "__main__":
    main()
