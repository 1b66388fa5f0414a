"""Small engines for the unit tests of the engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from worker.engine import Engine, EngineConfig, Request, Sampling, tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random Llama."""
    return tiny.tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def open_tiny(tiny_path: Path) -> Iterator[Callable[..., Engine]]:
    """Open the tiny model in float64 with the given EngineConfig fields; closed after the test."""
    opened = []

    def open_engine(**fields: object) -> Engine:
        engine = Engine.load(str(tiny_path), EngineConfig(**{"dtype": "float64", **fields}))  # type: ignore[arg-type]
        opened.append(engine)
        return engine

    yield open_engine
    for engine in opened:
        engine.close()


def request(id: str, prompt_ids: list[int], **sampling: object) -> Request:
    fields = {"max_tokens": 16, "temperature": 0.0, **sampling}
    return Request(id, prompt_ids, Sampling(**fields))  # type: ignore[arg-type]
