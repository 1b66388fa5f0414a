"""Small engines for the unit tests of the engine."""

import functools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.engine import EngineConfig, Request, Sampling, loader, tiny
from worker.engine.fallback import FallbackEngine
from worker.engine.native import library


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Llama."""
    return tiny.tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_loaded(tiny_path: Path) -> loader.Loaded:
    """The tiny model in float64, loaded once: tests that change it put it back."""
    return loader.load(str(tiny_path), EngineConfig(device="cpu", dtype="float64"))


@pytest.fixture
def open_tiny(tiny_loaded: loader.Loaded) -> Iterator[Callable[..., FallbackEngine]]:
    """Open an engine on the tiny model with the given EngineConfig fields; closed after the test."""
    opened = []

    def open_engine(**fields: Any) -> FallbackEngine:
        config = EngineConfig(**fields)
        context = config.context_tokens or tiny_loaded.context_tokens
        engine = FallbackEngine(replace(tiny_loaded, context_tokens=context), config)
        opened.append(engine)
        return engine

    yield open_engine
    for engine in opened:
        engine.close()


@pytest.fixture(scope="session")
def open_subject(tiny_loaded: loader.Loaded) -> Callable[..., Any]:
    """Return the model of an architecture as the fast engine runs it, opened once for each backend."""
    from tests.unit.engine import exactness

    def open_subject(name: str, backend: str = "auto") -> exactness.Subject:
        return exactness.Subject.open(name, tiny_loaded.tokenizer, backend)

    return functools.cache(open_subject)


@pytest.fixture(autouse=True)
def two_threads_for_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tests of compiled kernels on two threads, also where each process of tests has one."""
    name = request.module.__name__.rpartition(".")[2]
    if not name.startswith(("test_native", "test_products", "test_int_linear")):
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def request(id: str, prompt_ids: list[int], **sampling: Any) -> Request:
    return Request(id, prompt_ids, Sampling(**{"max_tokens": 16, "temperature": 0.0, **sampling}))


def native_or_skip(dtype: torch.dtype) -> library.Kernels:
    """Return the compiled kernels; skip the test on a machine without a compiler."""
    kernels = library.kernels(dtype, torch.device("cpu"))
    if kernels is None:
        assert not any(map(shutil.which, library._COMPILERS)), "the kernels do not compile"
        pytest.skip("no C++ compiler on this machine")
    return kernels
