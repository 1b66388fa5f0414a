"""One rank of a team without a Celery worker: `python -m tests.integration.team_process WHAT PATH...`."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.integration import paged_steps
from worker.engine import EngineConfig, guards, leading, loader, pages, parallel, runner
from worker.engine.attention_flash import FlashAttention
from worker.engine.flash_standin import StandIn
from worker.engine.paged_step import PagedStep

FAILED = 7
TIMEOUT_SECONDS = 5


class PagedRunner(runner.ModelRunner):
    """Runs steps over pages of 8 tokens on a CPU; fails in step `fails_at` as `how` says."""

    def __init__(self, model: Any, fails_at: int | None = None, how: str = "") -> None:
        backend: Any = FlashAttention(StandIn(paged_steps.PAGE_TOKENS), paged_steps.PAGE_TOKENS)
        super().__init__(model, backend)
        self.page_sets = 0
        self._last_pool: pages.Pool | None = None
        self._left, self._how = fails_at, how

    def step(self, step: PagedStep) -> Tensor:  # type: ignore[override]
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                _fail(self._how)
        if step.copies is not None:
            step.pool.copy(*step.copies)
        return super().step(step)  # type: ignore[arg-type]


def load(path: str, dtype: str) -> Any:
    """Load a model, as an engine would, and try it."""
    loaded = loader.load(path, EngineConfig(dtype=dtype))
    guards.prepare(loaded.model)
    return loaded.model


def compute(runner: Any) -> list[Tensor]:
    """Return the logits of all rows of all steps."""
    pool = pages.Pool(runner.layout, paged_steps.PAGES, paged_steps.PAGE_TOKENS)
    return [row for step in paged_steps.steps(pool) for row in runner.step(step)]


def _fail(how: str) -> None:
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(600)
    raise RuntimeError("a step that fails")


def _logits(team: parallel.Team, paths: list[str]) -> None:
    """Compute all steps of each model, in two pools; rank 0 saves the logits beside it."""
    for path in paths:
        dtype = Path(path).name.split("-")[-1]
        ready = PagedRunner(load(path, dtype))
        if team.rank:
            leading.follow(ready, team)
            continue
        led = leading.ParallelRunner(ready, team)
        led.hold(pages.Pool(led.layout, 2, paged_steps.PAGE_TOKENS))
        assert led.free_bytes(1) == 1
        assert led.free_bytes(1 << 60) < 1 << 60
        torch.save((ready.layout.layers, torch.stack(compute(led))), f"{path}/led.pt")
        led.close()
        led.close()


def _failing(team: parallel.Team, how: str, path: str) -> None:
    """Fail in the second step of rank 1, or, with `how` "alone", of rank 0."""
    fails = team.rank == (0 if how == "alone" else 1)
    ready = PagedRunner(load(path, "float64"), 1 if fails else None, how)
    if team.rank:
        leading.follow(ready, team)
        return
    led = leading.ParallelRunner(ready, team)
    try:
        compute(led)
    except leading.OutOfStep as error:
        print(error, flush=True)
        os._exit(FAILED)


def main() -> None:
    torch.set_num_threads(1)
    what, *paths = sys.argv[1:]
    team = parallel.join("cpu", TIMEOUT_SECONDS)
    if what == "logits":
        _logits(team, paths)
    else:
        _failing(team, what, paths[0])
    os._exit(0)


if __name__ == "__main__":
    main()
