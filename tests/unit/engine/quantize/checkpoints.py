"""Whole quantised checkpoints of the tiny model, written by the formats' definitions."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.engine.quantize import layouts

Pack = Callable[[layouts.Quantised], dict[str, Tensor]]


def write(
    source: Path, target: Path, config: dict[str, Any], pack: Pack, **how: Any
) -> dict[str, layouts.Quantised]:
    """Write a checkpoint with random quantised products in place of the source's; return them by name."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    made = {}
    for seed, name in enumerate(sorted(name for name in tensors if _is_product(name))):
        weight = tensors.pop(name)
        name = name.removesuffix(".weight")
        made[name] = layouts.made(*weight.shape, seed=seed, **how)
        made[name].scales *= 4  # so that outputs vary
        tensors |= {f"{name}.{part}": tensor for part, tensor in pack(made[name]).items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    set_config(target, config)
    return made


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def set_config(directory: Path, quantization: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def change(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )


def dequantised(source: Path, made: dict[str, layouts.Quantised]) -> Any:
    """Return transformers' own model with the weights that the integers stand for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, weight in made.items():
        model.get_submodule(name).weight.data = weight.weight.float()
    return model.eval()


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Return what `generate` makes of a prompt, an end of the sequence being a token like others."""
    from transformers import GenerationConfig

    given = torch.tensor([ids])
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    model.generation_config = config
    made = model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    return made[0, len(ids) :].tolist()


def _is_product(name: str) -> bool:
    return ".layers." in name and name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight"))
