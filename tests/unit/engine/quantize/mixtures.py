"""Tiny mixtures of experts as checkpoints, with the tokenizer of the tiny model."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.engine import architectures
from tests.unit.engine.quantize import checkpoints, layouts
from worker.engine.quantize import experts, int_experts, mixing


def write(name: str, tiny_path: Path, target: Path) -> Path:
    """Write a random mixture in float32, as transformers saves it: experts apart, where its rules say so."""
    architectures.build(name).float().save_pretrained(target)
    for file in tiny_path.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, target)
    return target


def reference(source: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Return transformers' own model with other weights of linear layers, and of single experts, by name."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
    for name, weight in weights.items():
        if ".experts." in name:
            _set_expert(model, name, weight)
        else:
            model.get_submodule(name).weight.data = weight.float()
    return model.to(dtype).eval()


def _set_expert(model: Any, name: str, weight: Tensor) -> None:
    owner, parameter = experts.weight_of(name)
    module = model.get_submodule(owner)
    number = int(name.split(".")[-2])
    getattr(module, parameter).data[number] = weight.T if module.is_transposed else weight


def dequantised(source: Path, target: Path, made: dict[str, layouts.Quantised]) -> Any:
    """Return transformers' own model with the weights that integers stand for, by the checkpoint's names."""
    shutil.copytree(source, target)
    checkpoints.change(
        target, lambda tensors: tensors.update({f"{name}.weight": each.weight for name, each in made.items()})
    )
    return reference(target, {}, torch.float32)


def weights(model: Any) -> dict[str, Any]:
    """Return the quantised weights of a loaded model, of experts by number and parameter."""
    found = {}
    for name, each in model.named_modules():
        if hasattr(each, "grouped"):
            found[name] = each.grouped
    for name, each in model.named_modules():
        if isinstance(each, int_experts.IntExperts):
            first, second = mixing.parameters(each.own)
            for kind, parameter in (("up", first), ("down", second)):
                for number in range(len(each.up)):
                    found[f"{name}.{number}.{parameter}"] = found.pop(f"{name}.{kind}.{number}")
    return found
