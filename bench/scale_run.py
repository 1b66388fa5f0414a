"""A recorded run of `longhaul autoscale`: no worker, a job, a burst of jobs, no worker again.

Everything is real: Redis, SeaweedFS and the API as `longhaul up` starts them, the autoscaler and its workers
(two at most, without a GPU), HumanEval prompts over HTTP. Each half second a line of JSON is written with

  queued, leased, depth            requests, from the ledger
  units                            open units of jobs, from the ledger
  starting, serving, retiring      workers, from the autoscaler's events
  output_tokens                    sampled so far, from the workers' metrics; null when one did not answer
  tokens_per_second                of that, over the last two seconds

and at the end what the autoscaler said, with its reasons. `at` is seconds since the start of the recording.
The figures are lines of JSON too. `first_token.*` divides the time from the first job's POST to its first
token; `told_by` says by what (bench/scale/recording.py).
"""

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import orjson

from bench import humaneval
from bench.scale import recording
from bench.scale.recorder import Recorder
from jobs import client, errors, ids, servers
from jobs.ledger import Job, Ledger
from jobs.model_settings import ModelSettings
from jobs.settings import PREFIX, Settings
from jobs.stack import Stack
from worker.engine import smollm2

MOST = 2
SYSTEM_WORDS = 40
BURST_AFTER_SECONDS = 5.0
END_SECONDS = 3.0
SETTINGS = {
    "scale_idle_seconds": "20",
    "scale_target_seconds": "60",
    "max_running": "16",
    "metrics_port": "9464",
    "log_format": "json",
}
"""In place of defaults, so that a burst of minutes starts a second worker, and both end within a minute."""


@dataclass(frozen=True)
class Posted:
    """A job: when its POST was sent and answered (unix seconds)."""

    id: str
    at: float
    answered: float


@click.command()
@click.option("--model", help="A directory or hub id.  [default: SmolLM2-135M-Instruct]")
@click.option("--echo", is_flag=True, help="An engine that echoes, a second a step: for a quick test.")
@click.option("--requests", type=click.IntRange(min=1), default=24, show_default=True, help="Of each job.")
@click.option("--jobs", type=click.IntRange(min=1), default=6, show_default=True, help="In the burst.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("-o", "output", type=click.File("w"), required=True, help="Where the samples go.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the run into a PNG.")
def main(
    model: str | None,
    echo: bool,
    requests: int,
    jobs: int,
    max_tokens: int,
    output: Any,
    plot: Path | None,
) -> None:
    """Run one job, later JOBS at once, on workers that come and go, and record it."""
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'longhaul[bench]'")
    name = Path(model).name if model else smollm2.NAME
    engine: dict[str, Any] = {"engine": "echo", "faults": ("slow:1",)} if echo else {}
    models = {name: ModelSettings(source=model or str(smollm2.ensure(report=True)), **engine)}
    system = humaneval.system_message(SYSTEM_WORDS)
    lines = list(humaneval.requests(requests * (jobs + 1), name, max_tokens, system))
    batches = [lines[start : start + requests] for start in range(0, len(lines), requests)]
    try:
        with running(models, output) as (recorder, api, ledger):
            recorder.note(settings=SETTINGS, model=name, echo=echo)
            run = Run(recorder, api, ledger)
            run.record(batches)
            figures, whole = run.figures(), run.whole
    except errors.LonghaulError as error:
        sys.exit(f"longhaul: {error}")
    for figure in figures:
        click.echo(json.dumps(figure))
    if plot:
        from bench.scale import plots

        plots.recorded(recording.columns(recorder.samples), run.posts, plot)
    sys.exit(int(not whole))


@contextmanager
def running(
    models: dict[str, ModelSettings], output: Any
) -> Iterator[tuple[Recorder, client.Client, Ledger]]:
    """Start all but workers, and an autoscaler; stop them, and the workers that it has, at the end."""
    extra = {PREFIX + name.upper(): value for name, value in SETTINGS.items()}
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="longhaul-scale-")))
        stack = closing.enter_context(Stack(folder, models=models, workers=0, extra=extra))
        scaler = _autoscaler(stack)
        closing.callback(scaler.stop)
        settings = Settings.load(redis_url=stack.environment["LONGHAUL_REDIS_URL"], models=models)
        ledger = Ledger.connect(settings)
        recorder = Recorder(stack, scaler, ledger, settings.fingerprints[next(iter(models))], output)
        closing.callback(recorder.close)
        yield recorder, closing.enter_context(client.Client(stack.api_url)), ledger


def _autoscaler(stack: Stack) -> servers.Server:
    command = [sys.executable, "-m", "jobs.cli", "autoscale", "--json", "--min", "0"]
    command += ["--max", str(MOST), "--cpus", str(MOST), "--logs", str(stack.logs)]
    environment = os.environ | stack.environment
    log = stack.logs / "autoscale.log"
    return servers.Server("autoscale", command, log, environment=environment, stop_seconds=60)


class Run:
    """The jobs of a recorded run, and the figures about them."""

    def __init__(self, recorder: Recorder, api: client.Client, ledger: Ledger) -> None:
        self._recorder, self._api, self._ledger = recorder, api, ledger
        self.jobs: list[Posted] = []

    def record(self, batches: list[list[dict[str, Any]]]) -> None:
        """Run the first batch alone, then the others at once, then wait until no worker is left."""
        first, *burst = [self._upload(lines) for lines in batches]
        self._recorder.wait(2)
        self._post(first)
        self._recorder.until(self._ended)
        self._recorder.wait(BURST_AFTER_SECONDS)
        for file_id in burst:
            self._post(file_id)
        self._recorder.until(self._ended)
        self._recorder.until(lambda: not self._recorder.workers)
        self._recorder.wait(END_SECONDS)

    @property
    def posts(self) -> list[float]:
        """When jobs were posted, in seconds of the recording."""
        return [job.at - self._recorder.began for job in self.jobs]

    @property
    def whole(self) -> bool:
        """Whether every request of every job was completed."""
        return all(job.completed == job.total for job in map(self._job, self.jobs))

    def figures(self) -> list[dict[str, Any]]:
        """Return what is printed: one figure after another."""
        return [*self._first_token(), *self._all(), *self._burst()]

    def _upload(self, lines: list[dict[str, Any]]) -> str:
        with tempfile.TemporaryFile() as stream:
            stream.writelines(orjson.dumps(line) + b"\n" for line in lines)
            return self._api.upload("input.jsonl", stream)

    def _post(self, file_id: str) -> None:
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        at = time.time()
        job_id = self._api.create(body, idempotency_key=file_id).id
        self.jobs.append(Posted(job_id, at, time.time()))
        self._recorder.note(at=round(at - self._recorder.began, 3), posted=job_id)

    def _job(self, posted: Posted) -> Job:
        job = self._ledger.job(posted.id)
        assert job is not None
        return job

    def _ended(self) -> bool:
        return all(self._job(posted).state.terminal for posted in self.jobs)

    def _metrics(self, posted: Posted) -> list[dict[str, Any]]:
        text = b"".join(self._api.content(ids.result_file_id(posted.id, "metrics")))
        return [orjson.loads(line) for line in text.splitlines()]

    def _first_token(self) -> Iterator[dict[str, Any]]:
        job, recorder = self.jobs[0], self._recorder
        found = recording.first_token(
            job.id, job.at, job.answered, recorder.scaler_events, recorder.worker_logs, self._metrics(job)
        )
        yield _figure("first_token_seconds", found.seconds, told_by="metrics.jsonl, from the POST on")
        for step, seconds in found.steps.items():
            yield _figure(f"first_token.{step}_seconds", seconds, told_by=recording.STEPS[step])
        if found.plan_seconds is not None:
            yield _figure(
                "plan_seconds", found.plan_seconds, told_by="worker's log: 'unit done', its seconds"
            )

    def _all(self) -> Iterator[dict[str, Any]]:
        samples = self._recorder.samples
        ended = [event["at"] for event in self._recorder.scaler_events if event["event"] == "ended"]
        done = max(max(self._job(posted).times.values()) for posted in self.jobs)
        yield _figure("requests", sum(self._job(posted).total for posted in self.jobs))
        yield _figure("completed", sum(self._job(posted).completed for posted in self.jobs))
        yield _figure("most_depth", max(sample["depth"] for sample in samples))
        yield _figure("most_serving", max(sample["serving"] for sample in samples))
        yield _figure("idle_until_no_worker_seconds", max(ended) - done)
        yield _figure("sampled_tokens", max(sample["output_tokens"] or 0 for sample in samples))

    def _burst(self) -> Iterator[dict[str, Any]]:
        metrics = [line for posted in self.jobs[1:] for line in self._metrics(posted)]
        seconds = max(line["finished_at"] for line in metrics) - self.jobs[1].at
        tokens = sum(line["completion_tokens"] for line in metrics)
        yield _figure("burst_seconds", seconds, told_by="metrics.jsonl, from the first POST on")
        yield _figure("burst_tokens", tokens, told_by="metrics.jsonl")
        yield _figure("burst_tokens_per_second", tokens / seconds, told_by="all of it, starts included")


def _figure(name: str, value: float, **more: str) -> dict[str, Any]:
    return {"figure": name, "value": round(value, 3)} | more


if __name__ == "__main__":
    main()
