"""What `longhaul doctor` sees of a model without loading it: files cut off, absent, or too large to run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import hub
from jobs.doctor_findings import Look
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from worker import doctor_models
from worker.engine import tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    return shutil.copytree(whole, tmp_path / "tiny")


GIVEN = hub.Answer("given")


def checked(model: Path, answer: hub.Answer | None = GIVEN, **facts: object) -> dict[str, tuple[str, str]]:
    served = ModelSettings.model_validate({"source": str(model)} | facts)
    settings = Settings(models={"m": served}, device="cpu")
    return {
        found.name: (found.state, f"{found.said} {found.advice}")
        for found in doctor_models.check("m", served, settings, answer)
    }


def test_a_model_that_is_whole_is_ok(whole: Path) -> None:
    found = checked(whole)
    assert set(found) == {"files", "tokenizer", "chat template", "memory"}
    assert {state for state, _ in found.values()} == {"ok"}


def _cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _indexed(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (_cut, "is cut off"),
        (_pointer, "git lfs pull"),
        (_indexed, "model-00002-of-00002.safetensors is missing"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "is no safetensors file"),
        (lambda model: (model / "model.safetensors").write_bytes(b"\xff" * 50), "is cut off"),
        (lambda model: (model / "model.safetensors").unlink(), "no weights"),
        (lambda model: (model / "config.json").unlink(), "no config.json"),
        (shutil.rmtree, "no such directory"),
    ],
)
def test_what_is_wrong_with_its_files_is_told(
    model: Path, breaks: Callable[[Path], object], words: str
) -> None:
    breaks(model)
    state, said = checked(model)["files"]
    assert state == "wrong"
    assert words in said


def test_pickled_weights_count_where_they_may_be_read(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pickle_weights" in checked(model)["files"][1]
    assert checked(model, pickle_weights=True)["files"][0] == "ok"


def test_a_tokenizer_that_cannot_be_read_and_no_template_are_told(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert checked(model)["chat template"][0] == "warning"
    (model / "tokenizer.json").write_text("{")
    assert checked(model)["tokenizer"][0] == "wrong"


def test_a_file_that_is_no_gguf_is_told(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("no")
    assert "no GGUF" in checked(path)["files"][1]


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (GIVEN, "warning", "Fetch it before"),
        (None, "wrong", "HF_HUB_OFFLINE"),
        (hub.Answer("refused", "no such model", "Correct it."), "wrong", "no such model Correct it."),
        (hub.Answer("silent", "no network", "Give a directory."), "unchecked", "no network Give"),
    ],
)
def test_of_a_model_that_is_not_here_it_is_told_what_a_hub_says(
    answer: hub.Answer | None, state: str, words: str
) -> None:
    found, said = checked(Path("nobody/no-such-model"), answer)["files"]
    assert found == state
    assert words in said


@pytest.mark.parametrize(("free", "state"), [(10**6, "wrong"), (10**12, "ok")])
def test_a_model_larger_than_the_memory_is_wrong(
    whole: Path, monkeypatch: pytest.MonkeyPatch, free: int, state: str
) -> None:
    monkeypatch.setattr(doctor_models, "free_memory", lambda: free)
    settings = Settings(models={"m": ModelSettings(source=str(whole))}, device="cpu")
    assert doctor_models.memory(Look("x"), "m", settings).state == state
