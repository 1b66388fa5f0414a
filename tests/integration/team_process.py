"""One rank of a team without a Celery worker: `python -m tests.integration.team_process WHAT PATH...`."""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.integration import paged_steps
from tests.unit.engine.conftest import request
from worker.engine import Completion, Engine, EngineConfig, Request, guards, leading, loader, pages, parallel
from worker.engine.attention_flash import FlashAttention
from worker.engine.fast import FastEngine
from worker.engine.flash_standin import StandIn
from worker.engine.paged_step import PagedStep
from worker.engine.quantize import cache
from worker.engine.runner import ModelRunner

FAILED = 7
TIMEOUT_SECONDS = 5
FIELDS = "fields.json"
CACHE = "TEAM_PROCESS_CACHE"
"""Where quantised weights are kept, if not where they are kept else."""
KV_TOKENS = 200
"""Few, so that prefixes go to host memory and requests are preempted."""


class Failing:
    """A runner that fails in its second step, as `how` says."""

    def __init__(self, ready: ModelRunner, how: str) -> None:
        self.layout, self.device, self.reads_beyond = ready.layout, ready.device, ready.reads_beyond
        self._ready, self._how, self._steps = ready, how, 0

    def step(self, step: PagedStep) -> Tensor:
        self._steps += 1
        if self._steps < 2:
            return self._ready.step(step)
        if self._how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "hang":
            time.sleep(600)
        raise RuntimeError("a step that fails")


def config_of(path: str | Path) -> EngineConfig:
    """Return how a model is loaded; what its name does not say is in a file beside its own."""
    beside = Path(path, FIELDS)
    fields = json.loads(beside.read_text()) if beside.is_file() else {}
    return EngineConfig(dtype=str(path).split("-")[-1], **fields)


def load(path: str) -> tuple[loader.Loaded, ModelRunner]:
    """Load a model of which the name ends in its dtype, as an engine would, over pages of 8 tokens."""
    loaded = loader.load(path, config_of(path))
    size = paged_steps.PAGE_TOKENS
    return loaded, guards.prepare(loaded.model, FlashAttention(StandIn(size), size))


def compute(runner: Any) -> list[Tensor]:
    """Return the logits of all rows of all steps."""
    pool = pages.Pool(runner.layout, paged_steps.PAGES, paged_steps.PAGE_TOKENS)
    return [row for step in paged_steps.steps(pool) for row in runner.step(step)]


def requests() -> list[Request]:
    """Return prompts with and without a common prefix, greedy and sampled."""
    trunk = [(7 * i) % 250 for i in range(37)]
    tails = [[(13 * i + 5 * n + 2) % 250 for i in range(3 + 4 * n)] for n in range(6)]
    return [
        request(str(n), [*(trunk if n % 3 else []), *tail], max_tokens=12, temperature=float(n % 2), seed=n)
        for n, tail in enumerate(tails)
    ]


def run(engine: Engine) -> dict[str, list[int]]:
    done: list[Completion] = list(engine.generate(requests()))
    assert all(completion.error is None for completion in done), done
    return {completion.id: completion.token_ids for completion in done}


def _engine(team: parallel.Team, path: str) -> None:
    """Run an engine over the team; rank 0 saves its tokens beside the model."""
    loaded, ready = load(path)
    if team.rank:
        leading.follow(ready, team)
        return
    # The bytes of one rank: it has half of the KV heads.
    size = KV_TOKENS * ready.layout.token_bytes
    config = EngineConfig(kv_memory_bytes=size, kv_host_bytes=8 * size, prefill_chunk_tokens=16)
    engine = FastEngine(loaded, config, leading.lead(ready))
    tokens = run(engine)
    assert run(engine) == tokens
    Path(path, "tokens.json").write_text(json.dumps(tokens))
    assert engine.stats.prefix_tokens_reused > engine.stats.prefix_tokens_restored > 0
    engine.close()


def _logits(team: parallel.Team, paths: list[str]) -> None:
    """Compute all steps of each model; rank 0 saves the logits beside it."""
    for path in paths:
        _, ready = load(path)
        if team.rank:
            leading.follow(ready, team)
            continue
        led = leading.ParallelRunner(ready, team)
        torch.save((ready.layout.layers, torch.stack(compute(led))), f"{path}/led.pt")
        led.close()
        led.close()


def _failing(team: parallel.Team, how: str, path: str) -> None:
    """Fail in the second step of rank 1, or, with `how` "alone", of rank 0."""
    ready: Any = load(path)[1]
    if team.rank == (0 if how == "alone" else 1):
        ready = Failing(ready, how)
    if team.rank:
        leading.follow(ready, team)
        return
    try:
        compute(leading.ParallelRunner(ready, team))
    except leading.OutOfStep as error:
        print(error, flush=True)
        os._exit(FAILED)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    if CACHE in os.environ:
        cache.directory = lambda: Path(os.environ[CACHE])
    what, *paths = sys.argv[1:]
    team = parallel.join("cpu", TIMEOUT_SECONDS)
    if what == "same":
        _logits(team, paths)
        _engine(team, paths[0])
    else:
        _failing(team, what, paths[0])
    os._exit(0)


if __name__ == "__main__":
    main()
