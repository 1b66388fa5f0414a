"""How a team computes steps: rank 0 says what comes next, and all run the same forward.

The others have their share of the model and of the pages, and nothing else: no requests, no scheduler, no
sampling. A team loads and tries its model side by side, everybody with the same code; it is led from then on.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from worker.engine import attention_flash, graphs, host_tier, packing, pages, parallel, runner, step_wire
from worker.engine.attention_flash import FlashAttention
from worker.engine.flash_standin import StandIn
from worker.engine.paged_step import PagedStep
from worker.engine.scheduler import Batch
from worker.engine.types import Attention


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
    HOST = 4
    """Have so many pages of host memory."""
    MOVE = 5
    """Move pages out of the pool (1) or into it (0): how many, those of the
    pool, then those of host memory.
    """


class OutOfStep(RuntimeError):
    """Rank 0 failed in a step that the other ranks run on: the team cannot go on."""


class ParallelRunner:
    """The runner of rank 0. Has the others run each step, too.

    Whatever a step raises comes out as OutOfStep: even what one process alone could try again.
    """

    def __init__(self, ready: runner.ModelRunner, team: parallel.Team) -> None:
        self._runner = ready
        self._team = team
        self._closed = False
        self.layout = ready.layout
        self.device = ready.device
        self.reads_beyond = ready.reads_beyond

    def memory(self, budget: int) -> runner.Memory:
        """Return so many bytes of pages, or what is free where the least is; the others take as many."""
        self._tell(Order.FREE)
        free = self._team.least(self.device.free_bytes())
        memory = self._runner.memory(min(budget, free))
        if not isinstance(memory, pages.Memory):
            raise NotImplementedError("a team keeps keys and values in pages alone")
        self._tell(Order.HOLD, memory.pool)
        return memory

    def packer(self, memory: runner.Memory, cascade: bool) -> Callable[[Batch], packing.Packed]:
        """Return what makes the steps."""
        return self._runner.packer(memory, cascade)

    def record(self, limits: graphs.Limits | None) -> graphs.Counts:
        """Record nothing: one rank that pads a step while another cannot would wait for it for ever."""
        return graphs.Counts()

    def step(self, step: PagedStep) -> Tensor:
        """Compute a step; return the logits [R, V] of its wanted tokens, all of them here."""
        if not isinstance(step, PagedStep):
            raise NotImplementedError("a team runs steps over pages alone")
        try:
            numbers, values = step_wire.pack(step)
            self._tell(Order.STEP, step.pool, len(values), *numbers)
            self._team.share(values)
            return self._runner.step(step)
        except Exception as error:
            raise OutOfStep(f"{type(error).__name__} in a step that the other ranks run on") from error

    def add_host(self, memory: pages.Memory, size: int) -> None:
        """Give a memory so many bytes of the host, those of all ranks together."""
        tier = host_tier.HostTier(memory, size // self._team.size, self.device)
        here = tier.mover
        self._tell(Order.HOST, memory.pool, tier.pages)

        def move(out: bool, device_pages: list[int], host_pages: list[int]) -> None:
            try:
                self._tell(Order.MOVE, memory.pool, out, len(device_pages), *device_pages, *host_pages)
                here(out, device_pages, host_pages)
            except Exception as error:
                raise OutOfStep(f"{type(error).__name__} in a move that the other ranks make") from error

        tier.mover = move
        tier.streams = False
        memory.host = tier

    def close(self) -> None:
        """Have the others stop. May be called again."""
        if not self._closed:
            self._closed = True
            self._tell(Order.STOP)

    def _tell(self, order: Order, pool: pages.Pool | None = None, *numbers: int) -> None:
        size = (0, 0) if pool is None else (pool.pages, pool.page_tokens)
        self._team.send(order, *size, *numbers)


def backend(wanted: Attention, device: torch.device) -> str | runner.Backend:
    """Return what attends, as runner.ModelRunner takes it; raises attention_flash.Unavailable.

    A CPU has its own attention: only flash is refused there. Steps of a team go to its other ranks with the
    pages that they are over, so there it is over pages.
    """
    if parallel.current() is None:
        return wanted if device.type == "cuda" or wanted == "flash" else "auto"
    if wanted == "dense":
        raise attention_flash.Unavailable(
            "a model spread over several ranks needs pages, not dense attention"
        )
    functions: Any = StandIn() if device.type == "cpu" else attention_flash.load()
    return FlashAttention(functions)


def lead(ready: runner.ModelRunner) -> runner.Runner:
    """Return a runner that leads the team of this process; outside one, the same."""
    team = parallel.current()
    return ready if team is None else ParallelRunner(ready, team)


def add_host(leader: runner.Runner, memory: runner.Memory, size: int) -> None:
    """Give a memory that has pages so many bytes of the host for what it has no room for."""
    if not isinstance(memory, pages.Memory) or size < memory.page_bytes:
        return
    if isinstance(leader, ParallelRunner):
        leader.add_host(memory, size)
    else:
        memory.host = host_tier.HostTier(memory, size, leader.device)
        scorings = leader.scorings if isinstance(leader, runner.ModelRunner) else []
        memory.host.windows = [each.window for each in scorings if each.window is not None]


def follow(ready: runner.ModelRunner, team: parallel.Team) -> None:
    """Do what rank 0 says until it says stop."""
    pool: pages.Pool | None = None
    mover: host_tier.Mover | None = None
    while True:
        order, count, page_tokens, values, *numbers = team.receive()
        if order == Order.STOP:
            return
        if order == Order.FREE:
            team.least(ready.device.free_bytes())
            continue
        if pool is None or (pool.pages, pool.page_tokens) != (count, page_tokens):
            pool = mover = None  # give their memory back first
            pool = pages.Pool(ready.layout, count, page_tokens)
        if order == Order.HOST:
            mover = host_tier.mover(pool, host_tier.host_pool(pool, values, ready.device), ready.device)
        if order == Order.MOVE:
            assert mover is not None
            moving, *moved = numbers
            mover(bool(values), moved[:moving], moved[moving : 2 * moving])
        if order == Order.STEP:
            shared = team.share(torch.empty(values, dtype=torch.int64, device=team.device))
            ready.step(step_wire.unpack(numbers, shared, pool))
