"""How hidden states become a vector: what a model's sentence-transformers files say, read and applied."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import embedding_models as models
from worker.engine.embeddings import pooling
from worker.engine.embeddings.pooling import Pooling


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_tokens": True}, ("mean",)),
        ({"pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "lasttoken"]}, ("mean", "lasttoken")),
    ],
)
def test_the_pooling_is_what_the_models_files_say(
    tmp_path: Path, config: dict[str, Any], modes: tuple[str, ...]
) -> None:
    models.write_modules(tmp_path, config)
    assert pooling.read(str(tmp_path), {}, pooling.LAST) == Pooling(modes)
    models.write_modules(tmp_path, config, "Normalize")
    assert pooling.read(str(tmp_path), {}, pooling.LAST) == Pooling(modes, (pooling.normalize,))


def test_without_files_the_default_stands(tmp_path: Path) -> None:
    assert pooling.read(str(tmp_path), {}, pooling.LAST) is pooling.LAST


@pytest.mark.parametrize(
    ("config", "others", "reason"),
    [
        ({"pooling_mode_median_tokens": True}, (), "pooling_mode_median_tokens"),
        ({"pooling_mode": "median"}, (), "median"),
        ({}, (), "no mode"),
        ({"pooling_mode": "mean"}, ("LSTM",), "LSTM in place 2"),
    ],
)
def test_an_unknown_pooling_is_not_guessed(
    tmp_path: Path, config: dict[str, Any], others: tuple[str, ...], reason: str
) -> None:
    models.write_modules(tmp_path, config, *others)
    with pytest.raises(pooling.Unsupported, match=reason):
        pooling.read(str(tmp_path), {}, pooling.LAST)


def test_a_dense_layer_is_applied(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    models.write_modules(tmp_path, {"pooling_mode": "mean"}, "Dense")
    (tmp_path / "2_Dense").mkdir()
    facts = {"in_features": 2, "out_features": 1, "activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(facts))
    weights = {"linear.weight": torch.tensor([[1.0, 2.0]]), "linear.bias": torch.tensor([0.5])}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    how = pooling.read(str(tmp_path), {}, pooling.LAST)
    found = how([torch.tensor([[0.0, 0.0], [0.2, 0.4]])])
    assert torch.allclose(found, torch.tanh(torch.tensor([[0.1 + 0.4 + 0.5]])))


def test_a_hub_models_files_are_found_in_its_cache_at_the_wanted_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {"main": "a" * 40, "old": "b" * 40}
    for (revision, commit), mode in zip(commits.items(), ("cls", "mean"), strict=True):
        model = tmp_path / "models--org--name"
        (model / "refs").mkdir(parents=True, exist_ok=True)
        (model / "refs" / revision).write_text(commit)
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        models.write_modules(snapshot, {"pooling_mode": mode})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    offline = {"local_files_only": True, "trust_remote_code": False}
    assert pooling.read("org/name", {**offline, "revision": None}, pooling.LAST) == Pooling(("cls",))
    assert pooling.read("org/name", {**offline, "revision": "old"}, pooling.LAST) == Pooling(("mean",))
    assert pooling.read("org/other", {**offline, "revision": None}, pooling.LAST) is pooling.LAST


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("cls", [1.0, 0.0]),
        ("lasttoken", [3.0, 6.0]),
        ("mean", [2.0, 3.0]),
        ("max", [3.0, 6.0]),
        ("mean_sqrt_len_tokens", [6 / 3**0.5, 9 / 3**0.5]),
        ("weightedmean", [(1 + 4 + 9) / 6, (0 + 6 + 18) / 6]),
    ],
)
def test_each_mode_is_what_its_name_says(mode: str, expected: list[float]) -> None:
    hidden = torch.tensor([[1.0, 0.0], [2.0, 3.0], [3.0, 6.0]])
    assert torch.allclose(Pooling((mode,))([hidden]), torch.tensor([expected]))


def test_half_precision_is_pooled_in_float32() -> None:
    hidden = torch.full((4096, 1), 0.1, dtype=torch.bfloat16)
    assert torch.equal(Pooling(("mean",))([hidden]), hidden[:1].float())
