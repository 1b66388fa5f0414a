"""What a closed engine held is given back, so that another model finds room in the same process."""

import gc
import resource
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.conftest import request
from worker import engine
from worker.engine import EngineConfig, heap, loader, opening


@pytest.fixture(autouse=True)
def frozen_again() -> Iterator[None]:
    """Leave garbage collection as tests/conftest.py has it."""
    yield
    gc.freeze()


@pytest.mark.parametrize(
    "config",
    [EngineConfig(device="cpu"), EngineConfig(device="cpu", fast=False)],
    ids=["fast", "fallback"],
)
def test_a_closed_engine_is_gone_with_its_model(
    config: EngineConfig, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening one takes what is loaded out of the garbage collector's sight, cycles of objects too."""
    held: list[weakref.ref[Any]] = []
    load = loader.load

    def watched(*arguments: Any) -> loader.Loaded:
        loaded = load(*arguments)
        held.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(loader, "load", watched)
    opened = opening.open_model(str(tiny_path), config)
    (completion,) = opened.generate([request("r", [1, 2, 3])])
    assert completion.finish_reason in ("stop", "length")
    held.append(weakref.ref(opened))
    ring: list[Any] = [opened]
    ring.append(ring)  # as the puller, which the engine calls, holds the engine
    gc.freeze()
    opened.close()
    del opened, ring
    engine.free_memory()
    assert [each() for each in held] == [None, None]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_memory_that_was_kept_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    heap.keep_freed_memory()
    blocks = [bytearray(1 << 20) for _ in range(128)]
    full = resident()
    del blocks
    kept = resident()
    heap.release()
    assert full - kept < 64 << 20, "nothing is shown if it is not kept"
    assert full - resident() > 100 << 20
