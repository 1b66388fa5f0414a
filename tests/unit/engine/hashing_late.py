"""The hashing model over pages on a device that does everything late: a step is one operation of torch, which
sees what its tensors hold when the device gets to it.
"""

import torch
from torch import Tensor

from tests.unit.engine import hashing, late_device
from tests.unit.engine.hashing_pages import PAGE_TOKENS, PagedHashRunner
from worker.engine import device, pages, paging, runner, step_wire
from worker.engine.paged_step import PagedStep


class LateHashRunner(PagedHashRunner):
    """Computes when it is waited for. `device` can be another one that runs ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.device: device.Device = late_device.LateDevice()

    def packer(self, memory: runner.Memory, cascade: bool) -> object:  # type: ignore[override]
        assert isinstance(memory, pages.Memory)
        packer = paging.Packer(memory, self.device.stage, windows=True, cascades=cascade)
        packer.least_saved = 1
        return packer.pack

    def step(self, step: PagedStep) -> Tensor:  # type: ignore[override]
        step.attention_calls += 1
        numbers, values = step_wire.pack(step)
        pool = step.pool
        return _step(values, numbers, len(step.wanted), pool.keys[0], pool.values[0])


class _Held(pages.Pool):
    """Pages whose memory is there."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.page_tokens = PAGE_TOKENS
        self.keys, self.values = [keys], [values]


@torch.library.custom_op("longhaul_tests::hash_step", mutates_args=("keys", "values"))
def _step(sizes: Tensor, numbers: list[int], wanted: int, keys: Tensor, values: Tensor) -> Tensor:
    step = step_wire.unpack(numbers, sizes, _Held(keys, values))
    return PagedHashRunner().step(step)


@_step.register_fake
def _(sizes: Tensor, numbers: list[int], wanted: int, keys: Tensor, values: Tensor) -> Tensor:
    return torch.empty(wanted, hashing.VOCABULARY, device=sizes.device)
