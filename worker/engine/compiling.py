"""torch.compile for what lies between the matrix products, where it pays: a GPU that has Triton.

All of it is compiled when the model is tried at load, nothing while it serves.
"""

import importlib.util
import logging
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from worker.engine import device_errors, pointwise
from worker.engine.types import Compile, Stats

log = logging.getLogger(__name__)
TOKENS = (2, 3, 1)
"""What has to run once so that all is compiled: a number, another (from there on any), and one."""


class Compiler:
    """Compiles functions of tensors, or leaves them as they are; counts those that do not compile."""

    def __init__(self, on: bool = False, backend: str = "inductor") -> None:
        self.on = on
        self._backend = backend
        self._stats = Stats()
        if on:
            _prepare()

    def pointwise(self) -> pointwise.Pointwise:
        """Return the functions of a layer."""
        if not self.on:
            return pointwise.PLAIN
        return pointwise.Pointwise(
            *(self.compiled(run) for run in (pointwise.norm, pointwise.rotate, pointwise.gate))
        )

    def compiled(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function compiled; from the first time on that it does not compile it runs as it is."""
        return _Compiled(run, self._backend, self._note)

    def count_in(self, stats: Stats) -> None:
        """Count in an engine's stats from now on, with what has been counted."""
        stats.compile_fallbacks += self._stats.compile_fallbacks
        self._stats = stats

    def _note(self, name: str, error: Exception) -> None:
        self._stats.compile_fallbacks += 1
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        log.warning("%s runs as it is: it does not compile", name, extra={"reason": reason})


def _prepare() -> None:
    """Import torch's compiler, whatever its modules warn of."""
    with warnings.catch_warnings(action="ignore"):
        import torch._inductor.compile_fx
    # Of one function, whoever compiles it: a process may open several models, one after the other.
    torch._dynamo.config.recompile_limit = 64
    # A few small kernels need no pool of processes, which would stay.
    torch._inductor.config.compile_threads = 1


class _Compiled:
    def __init__(
        self, plain: Callable[..., Tensor], backend: str, note: Callable[[str, Exception], None]
    ) -> None:
        self._plain = plain
        self._run: Callable[..., Tensor] | None = torch.compile(plain, fullgraph=True, backend=backend)
        self._note = note

    def __call__(self, *arguments: Tensor | float | None) -> Tensor:
        if self._run is not None:
            try:
                return self._run(*arguments)
            except Exception as error:  # a compiler may fail in any way
                if device_errors.is_out_of_memory(error) or device_errors.is_lost(error):
                    raise
                self._run = None
                self._note(self._plain.__name__, error)
        return self._plain(*arguments)


def choose(wanted: Compile, device: torch.device) -> Compiler:
    """Return a compiler that is on or off; auto is on for a GPU where there is Triton."""
    able = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return Compiler(wanted == "on" or (wanted == "auto" and able))
