"""What only a card can show. Without CUDA all of it is skipped.

With LONGHAUL_GPU_REHEARSAL=1 the same tests run on the CPU, flash-attn's stand-in in its place, so that they
are right when they meet a card; what needs one is skipped then.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import subjects
from tests.unit.engine.conftest import tiny_loaded, tiny_path
from worker.engine import attention_flash
from worker.engine.fast import FastEngine
from worker.engine.flash_standin import StandIn

__all__ = ["tiny_loaded", "tiny_path"]

REHEARSAL = os.environ.get("LONGHAUL_GPU_REHEARSAL") == "1"
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not (torch.cuda.is_available() or REHEARSAL):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def card(device: torch.device) -> torch.device:
    """The device, for tests that a CPU has nothing to say to."""
    if device.type != "cuda":
        pytest.skip("needs a card")
    return device


@pytest.fixture(scope="session")
def functions(device: torch.device) -> Any:
    """flash-attn's functions, or on a CPU their stand-in."""
    if device.type != "cuda":
        return StandIn()
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash-attn needs compute capability 8.0")
    try:
        return attention_flash.load()
    except attention_flash.Unavailable as error:
        pytest.skip(f"{error}")


@pytest.fixture
def open_engine(device: torch.device, functions: Any) -> Iterator[Callable[..., FastEngine]]:
    """Open an engine over pages on a subject, with fields of EngineConfig; closed after the test."""
    opened: list[FastEngine] = []

    def open_engine(subject: subjects.Subject, **fields: Any) -> FastEngine:
        opened.append(subject.paged(functions, **fields))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


@pytest.fixture(scope="session")
def qwen3(device: torch.device) -> subjects.Subject:
    return subjects.subject("qwen3", device)
