"""What the engine asks of a device besides the forward: copies that do not wait, and recorded steps.

Kept small, so that the order of events is tested on a CPU: a fake device does everything late.
"""

import functools
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import arena, cuda_device


class Fetch(Protocol):
    """Values on their way to the host."""

    def wait(self) -> NDArray[Any]:
        """Return them once they are here."""
        ...


class Device(Protocol):
    """Where tensors are. Everything that is launched runs in the order of the launches."""

    torch: torch.device
    ahead: bool
    """Whether launching returns before the work is done, so that the host can be a step ahead."""

    def stage(self, values: NDArray[Any]) -> Tensor:
        """Return a tensor with values of the host. The copy does not wait for the device; the array is the
        caller's again at once.
        """
        ...

    def fetch(self, values: Tensor) -> Fetch:
        """Begin to copy a tensor to the host."""
        ...

    def pinned(self, size: int) -> Tensor:
        """Return so many bytes of host memory [size] uint8 that copies to and from the device do not wait
        for. It is that as long as this very tensor is held: its views do not keep it.
        """
        ...

    def beside(self, copies: Callable[[], None]) -> Callable[[], None]:
        """Launch copies after all that was launched before, and beside what is launched next; return what
        makes everything that is launched after it wait for them.
        """
        ...

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run once what has no effect but on tensors, record it, and return what repeats it, and the tensor
        that a repetition fills.
        """
        ...

    def free_bytes(self) -> int:
        """Return how much memory is free."""
        ...


class Host:
    """The CPU: everything is done when it is asked for."""

    ahead = False

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def stage(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(values))

    def fetch(self, values: Tensor) -> "_Here":
        return _Here(values.numpy())

    def pinned(self, size: int) -> Tensor:
        return arena.pages(size)[:size]

    def beside(self, copies: Callable[[], None]) -> Callable[[], None]:
        copies()
        return lambda: None

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = run()

        def repeat() -> None:
            result.copy_(run())

        return repeat, result

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Here:
    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values

    def wait(self) -> NDArray[Any]:
        return self._values


@functools.cache
def of(device: torch.device) -> Device:
    """Return the device of that name; the same one each time."""
    if device.type in ("cpu", "meta"):  # of a model on the meta device only shapes are asked for
        return Host()
    if device.type == "cuda":
        return cuda_device.CudaDevice(device)
    raise NotImplementedError(f"an engine on {device}")
