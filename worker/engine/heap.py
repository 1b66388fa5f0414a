"""How the process keeps memory: what a step frees, the next one needs again."""

import ctypes
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST = 32 << 20  # the largest threshold that glibc takes


def keep_freed_memory() -> None:
    """Let malloc keep what is freed: by default large temporaries go back to the system, which clears their
    pages again and again. Does nothing where the C library is another one.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(_MMAP_THRESHOLD, _MOST) and mallopt(_TRIM_THRESHOLD, 1 << 30)):
        log.info("malloc cannot be told to keep freed memory: steps are a little slower")


@contextmanager
def growing() -> Iterator[None]:
    """Make many objects that stay, without a search for garbage among them each time there are more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze() -> None:
    """Take what is loaded out of the garbage collector's sight: it is many objects, and here to stay."""
    gc.collect()
    gc.freeze()


def release() -> None:
    """Give back to the system what was held by what is gone, `freeze` and `keep_freed_memory` undone."""
    gc.unfreeze()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)
