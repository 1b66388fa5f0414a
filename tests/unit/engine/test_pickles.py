"""No pickle is read unless the operator says so: not of a model, not of a layer behind it."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import errors
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from worker.engine import EngineConfig, loader, open_engine
from worker.engine.embeddings import pooling

CPU = EngineConfig(device="cpu")
TRUSTING = EngineConfig(device="cpu", pickle_weights=True)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def pickled(tiny_path: Path, tmp_path: Path) -> Path:
    """A model whose weights are in pytorch_model.bin alone."""
    model = loader.load(str(tiny_path), CPU).model
    for file in tiny_path.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    return tmp_path


def test_a_model_of_pickles_is_refused_with_the_name_of_the_setting(pickled: Path) -> None:
    with pytest.raises(errors.ModelUnavailable, match="pickle_weights") as refused:
        loader.load(str(pickled), CPU)
    assert "\n" not in str(refused.value)
    with pytest.raises(errors.ModelUnavailable, match="pickle_weights"):
        open_engine("m", ModelSettings(source=str(pickled)), Settings(device="cpu"))


def test_an_operator_can_trust_a_model_of_pickles(pickled: Path, tiny_path: Path) -> None:
    loaded = loader.load(str(pickled), TRUSTING).model
    for name, weight in loader.load(str(tiny_path), CPU).model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_pickle_that_runs_code_runs_none_even_when_it_is_trusted(pickled: Path, trusted: bool) -> None:
    bombed = pickled / "bombed"
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(bombed)))
    with pytest.raises(errors.ModelUnavailable):
        loader.load(str(pickled), TRUSTING if trusted else CPU)
    torch.save({"x": Bomb(bombed)}, pickled / "pytorch_model.bin")
    with pytest.raises(errors.ModelUnavailable):
        loader.load(str(pickled), TRUSTING if trusted else CPU)
    assert not bombed.exists()


def test_a_missing_file_is_not_blamed_on_the_setting(tiny_path: Path) -> None:
    (tiny_path.parent / "empty").mkdir(exist_ok=True)
    with pytest.raises(errors.ModelUnavailable) as refused:
        loader.load(str(tiny_path.parent / "empty"), CPU)
    assert "pickle_weights" not in str(refused.value)


def test_a_layer_of_pickles_is_refused_too(tmp_path: Path) -> None:
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1"},
        {"type": "sentence_transformers.models.Dense", "path": "2"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for name, config in (("1", {"pooling_mode_mean_tokens": True}), ("2", {"in_features": 2})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    torch.save({"linear.weight": torch.eye(2)}, tmp_path / "2" / "pytorch_model.bin")
    with pytest.raises(pooling.Unsupported, match="pickle_weights"):
        pooling.read(str(tmp_path), {}, pooling.MEAN)
    assert len(pooling.read(str(tmp_path), {}, pooling.MEAN, pickles=True).layers) == 1
