"""How a team computes steps: rank 0 says what comes next, and all run the same forward.

The others have their share of the model and of the pages, and nothing else: no requests, no scheduler, no
sampling. A team loads and tries its model side by side, everybody with the same code; it is led from then on.
"""

from enum import IntEnum
from threading import Lock

import torch
from torch import Tensor

from worker.engine import pages, parallel, step_wire
from worker.engine.paged_step import PagedStep
from worker.engine.runner import Runner


class Order(IntEnum):
    """What rank 0 asks for: the first number of a message. The next two are the size of the pool, in pages
    and in tokens of a page.
    """

    STOP = 0
    HOLD = 1
    """Have the pages."""
    FREE = 2
    """Say how much memory of the device is free."""
    STEP = 3
    """Run a step: how many values are shared next, then what `step_wire` says of it."""


class OutOfStep(RuntimeError):
    """Rank 0 failed in a step that the other ranks run on: the team cannot go on."""


class ParallelRunner:
    """The runner of rank 0. Has the others run each step, too.

    Whatever a step raises comes out as OutOfStep: even what one process alone could try again.
    """

    def __init__(self, runner: Runner, team: parallel.Team) -> None:
        self._runner = runner
        self._team = team
        self._lock = Lock()
        self._closed = False
        self.layout = runner.layout
        self.reads_beyond = runner.reads_beyond

    def hold(self, pool: pages.Pool) -> None:
        """Have the others take the memory for their pages now rather than with the first step."""
        self._tell(Order.HOLD, pool)

    def free_bytes(self, free: int) -> int:
        """Return what is free on the device that has the least, of `free` on this one."""
        self._tell(Order.FREE)
        return self._team.least(free)

    def step(self, step: PagedStep) -> Tensor:
        """Compute a step; return the logits [R, V] of its wanted tokens, all of them here."""
        if not isinstance(step, PagedStep):
            raise NotImplementedError("a team runs steps over pages alone")
        try:
            numbers, values = step_wire.pack(step)
            self._tell(Order.STEP, step.pool, len(values), *numbers)
            self._team.share(values)
            return self._runner.step(step)  # type: ignore[arg-type]
        except Exception as error:
            raise OutOfStep(f"{type(error).__name__} in a step that the other ranks run on") from error

    def close(self) -> None:
        """Have the others stop. May be called again."""
        if not self._closed:
            self._closed = True
            self._tell(Order.STOP)

    def _tell(self, order: Order, pool: pages.Pool | None = None, *numbers: int) -> None:
        size = (0, 0) if pool is None else (pool.pages, pool.page_tokens)
        self._team.send(order, *size, *numbers)


def lead(runner: Runner) -> Runner:
    """Return a runner that leads the team of this process; outside one, the same."""
    team = parallel.current()
    return runner if team is None else ParallelRunner(runner, team)  # type: ignore[return-value]


def follow(runner: Runner, team: parallel.Team) -> None:
    """Do what rank 0 says until it says stop."""
    pool: pages.Pool | None = None
    while True:
        order, count, page_tokens, values, *numbers = team.receive()
        if order == Order.STOP:
            return
        if order == Order.FREE:
            team.least(_free_bytes(team.device))
            continue
        if pool is None or (pool.pages, pool.page_tokens) != (count, page_tokens):
            pool = None  # gives its memory back first
            pool = pages.Pool(runner.layout, count, page_tokens)
        if order == Order.STEP:
            shared = team.share(torch.empty(values, dtype=torch.int64, device=team.device))
            runner.step(step_wire.unpack(numbers, shared, pool))  # type: ignore[arg-type]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import os

    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
