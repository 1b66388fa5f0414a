"""What tests quantise is kept in a directory of their own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of kept weights, empty."""
    directory = tmp_path / "kept"
    monkeypatch.setattr("worker.engine.quantize.cache.directory", lambda: directory)
    return directory
