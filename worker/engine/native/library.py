"""The compiled kernels: found or built once for a machine, then called through plain pointers."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp")
# No flag that lets infinities or the order of sums change.
_MATHS = ("-fno-math-errno", "-fno-trapping-math")
_SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}
_BUILD_SECONDS = 300


class Unavailable(Exception):
    """Why there are no kernels on this machine."""


class Kernels:
    """The functions for one dtype. `width` columns of a weight lie side by side in a panel."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        suffix = _SUFFIXES[dtype]
        self.dtype = dtype
        self.real = ctypes.c_float if dtype == torch.float32 else ctypes.c_double
        self.width = int(library[f"width_{suffix}"]())
        self.product = library[f"product_{suffix}"]
        self.attention = library[f"attention_{suffix}"]
        self.decoder = library[f"decoder_{suffix}"]
        self.draw = library[f"draw_{suffix}"]
        self.logprobs = library[f"logprobs_{suffix}"]
        self.scratch = library[f"scratch_{suffix}"]
        self.scratch.restype = ctypes.c_int64
        self._pack = library[f"pack_{suffix}"]
        self._pack.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_int64]
        self._inverse_rms = library[f"inverse_rms_{suffix}"]
        self._inverse_rms.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, self.real]
        self._inverse_rms.argtypes += [ctypes.c_void_p, ctypes.c_int]

    def panels(self, outputs: int) -> int:
        return -(-outputs // self.width)

    def pack(self, weight: Tensor, into: Tensor, first: int = 0, every: int = 1) -> None:
        """Write the panels of a weight [outputs, inputs] to every so-manieth place of `into` [panels, inputs,
        width].
        """
        outputs, inputs = weight.shape
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        assert into.is_contiguous()
        assert into.shape[0] >= first + (self.panels(outputs) - 1) * every + 1
        apart = every * inputs * self.width
        self._pack(weight.data_ptr(), weight.stride(0), outputs, inputs, into[first].data_ptr(), apart)

    def inverse_rms(self, x: Tensor, epsilon: float) -> Tensor:
        """Return 1 / root mean square [T] of x [T, size]."""
        out = x.new_empty(x.shape[0])
        self._inverse_rms(
            x.data_ptr(), x.stride(0), *x.shape, epsilon, out.data_ptr(), torch.get_num_threads()
        )
        return out


def kernels(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """Return the kernels for a dtype, or None where torch's own operations have to do; says why, once."""
    if device.type != "cpu" or dtype not in _SUFFIXES or _disabled.get():
        return None
    try:
        return require(dtype, device)
    except Unavailable as reason:
        _warn(str(reason))
        return None


def require(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for a dtype; raises Unavailable."""
    if device.type != "cpu" or dtype not in _SUFFIXES:
        raise Unavailable(f"there are no kernels for {str(dtype).removeprefix('torch.')} on {device.type}")
    return _kernels(dtype)


_disabled: ContextVar[bool] = ContextVar("disabled", default=False)


@contextmanager
def disabled(really: bool = True) -> Iterator[None]:
    """Load and run models inside, in this thread, as on a machine without a compiler; or as outside."""
    token = _disabled.set(really or _disabled.get())
    try:
        yield
    finally:
        _disabled.reset(token)


@functools.cache
def _kernels(dtype: torch.dtype) -> Kernels:
    found = _library()
    if isinstance(found, Unavailable):
        raise found
    return Kernels(found, dtype)


@functools.cache
def _warn(reason: str) -> None:
    log.warning("torch's own operations instead of compiled kernels: slower", extra={"reason": reason})


@functools.cache
def _library() -> ctypes.CDLL | Unavailable:
    """Return the library, or why there is none: every layer of a model asks, and building takes seconds."""
    try:
        return _load(*cached())
    except Unavailable as reason:
        return reason


def _load(compiler: str, path: Path) -> ctypes.CDLL:
    """Load the library; build it when it is not there, and once more when what is there cannot be loaded."""
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            log.warning("compiled kernels are built again", extra={"path": path, "reason": str(error)})
    _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}") from error


def cached() -> tuple[str, Path]:
    """Return the compiler, and where the library for this source, compiler and processor is kept. Raises
    Unavailable.
    """
    compiler = _compiler()
    version = _output([compiler, "--version"])
    sources = [path.read_text() for path in sorted(_SOURCE.parent.glob("*.[ch]*"))]
    facts = [*sources, version, *_FLAGS, *_MATHS, platform.machine(), _processor()]
    name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
    return compiler, _cache() / f"{name}.so"


def _cache() -> Path:
    """Return the directory of what was built, made when missing: one that only this user can write to."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longhaul" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        raise Unavailable(f"no cache directory, see XDG_CACHE_HOME: {error}") from error
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(f"{folder} can be written to by others: what lies there is not loaded")
    return folder


def _build(compiler: str, path: Path) -> None:
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder, path.name)
            _output([compiler, *_FLAGS, *_MATHS, str(_SOURCE), "-o", str(draft)])
            draft.replace(path)  # other processes may build the same: the last one stays
    except OSError as error:
        raise Unavailable(f"{path.parent}: {error.strerror}") from error
    log.info("compiled kernels", extra={"path": path, "seconds": round(time.monotonic() - began, 1)})


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if name and (found := shutil.which(name)):
            return found
    raise Unavailable(f"no C++ compiler ({wanted or ', '.join(_COMPILERS)}) on PATH")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines() or [f"status {error.returncode}"]
        line = next((line for line in lines if "error" in line), lines[0])
        raise Unavailable(f"{command[0]} failed: {line}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    return done.stdout


def _processor() -> str:
    """Return what `-march=native` depends on: a cache may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kinds)))


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def structure(
    name: str, fields: str, real: Any = None, reals: str = "", **last: type[ctypes.Structure]
) -> type[ctypes.Structure]:
    """Return a C struct of int64 fields, those in `reals` of the type `real`, and of the structs `last`."""
    kinds = [(field, real if field in reals.split() else ctypes.c_int64) for field in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": [*kinds, *last.items()]})
