"""A CUDA device: copies through pinned memory, and steps recorded as CUDA graphs. Nothing here waits for the
whole device, except for a recording and for `free_bytes`.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import arena, ring

_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all cards."""
_WARM_UPS = 2
"""Before a recording: libraries allocate and choose kernels in the first run, and compilers in the second."""


class CudaDevice:
    """Launches everything on the stream that is current, so that order is that of the launches.

    `buffers` are what arrays are staged through: how many says how far the host was ahead.
    """

    ahead = True

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.buffers = ring.Ring(_Pinned)
        self._stream: torch.cuda.Stream | None = None
        self._copying: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Kept: the allocator may still ask them where memory belongs."""

    def stage(self, values: NDArray[Any]) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a recorded step stages an array: every repetition would copy what lies there")
        dtype = torch.from_numpy(np.empty(0, dtype=values.dtype)).dtype
        staged = torch.empty(values.shape, dtype=dtype, device=self.torch)
        if values.size:
            buffer = self.buffers.take(values.nbytes)
            host = buffer.memory[: values.nbytes].view(dtype).view(values.shape)
            np.copyto(host.numpy(), values)
            staged.copy_(host, non_blocking=True)
            buffer.read.record(torch.cuda.current_stream(self.torch))
        return staged

    def fetch(self, values: Tensor) -> "_Fetch":
        return _Fetch(values)

    def pinned(self, size: int) -> Tensor:
        """Lock pages of the system: torch's own pinned memory may be twice as much as is asked for."""
        memory = arena.pages(size)[:size]
        with torch.cuda.device(self.torch):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, _PORTABLE))
        weakref.finalize(memory, _unlock, memory.data_ptr(), self.torch).atexit = False
        return memory

    def beside(self, copies: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self.torch):
            current = torch.cuda.current_stream()
            if self._copying is None:
                self._copying = torch.cuda.Stream()
            self._copying.wait_stream(current)
            with torch.cuda.stream(self._copying):
                copies()
            done = self._copying.record_event()
        return lambda: current.wait_event(done)

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record a CUDA graph. All share one pool of memory: only what they return stays apart."""
        with torch.cuda.device(self.torch):
            stream = self._recording_stream()
            self._warm_up(run, stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # The outer context leaves the stream even when the inner one fails to: its exit may raise.
                with (
                    torch.cuda.stream(stream),
                    torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"),
                ):
                    result = run()
            except BaseException:
                self._failed.append(graph)
                # The allocator may take a recording that failed for one that goes on in its pool.
                self._pool = torch.cuda.graph_pool_handle()
                raise
        return graph.replay, result

    def free_bytes(self) -> int:
        """Return how much memory is free, after giving back what torch keeps unused. Waits for the device."""
        with torch.cuda.device(self.torch):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info()[0]

    def _recording_stream(self) -> torch.cuda.Stream:
        """Return the stream of all recordings: memory is shared only among those of one."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        return self._stream

    def _warm_up(self, run: Callable[[], Tensor], stream: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(stream):
            try:
                for nth in range(_WARM_UPS):
                    if nth == _WARM_UPS - 1:  # what waits fails here: in a recording it harms the allocator
                        torch.cuda.set_sync_debug_mode("error")
                    run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(stream)


def _unlock(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies may be on their way
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class _Pinned:
    """Memory that the device reads by itself, and the event after its last read."""

    def __init__(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.read = torch.cuda.Event()

    def done(self) -> bool:
        return self.read.query()


class _Fetch:
    """A copy to pinned memory that torch takes again when nobody holds it. Waits for this copy alone."""

    def __init__(self, values: Tensor) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._here = torch.cuda.Event()
        self._here.record(torch.cuda.current_stream(values.device))

    def wait(self) -> NDArray[Any]:
        self._here.synchronize()
        return self._host.numpy()
