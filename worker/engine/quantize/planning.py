"""What quantised weights take, from configs and headers alone."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.engine.quantize import checkpoint, experts, gguf_q4, hollow, loading, turns
from worker.engine.quantize.recipe import fitting_group
from worker.engine.quantize.tensors import Tensors
from worker.engine.quantize.weights import Bits
from worker.engine.types import EngineConfig


@dataclass(frozen=True)
class Kept:
    """A product's integers of so many bits, with scales and offsets, in bytes."""

    bits: Bits
    nbytes: int


def kept(
    model: Any, config: Any, wanted: EngineConfig, files: Sequence[Path], gguf: Path | None
) -> dict[str, Kept]:
    """Return what the products of a model on the meta device are kept as, by name, experts by that of their
    parameter; not those that stay.

    `files` are the safetensors of its checkpoint; without any, a checkpoint is taken to be quantised as its
    config says, in all of its layers. Raises ValueError for a layout that is not ours to read.
    """
    stored = loading.stored(config)
    ours = loading.is_wanted(config, wanted, gguf is not None)
    if stored is not None and not ours:
        raise ValueError(
            f"its weights are quantised ({stored.get('quant_method')}), and what they take is not known"
        )
    if ours:
        hollow.with_linears(model)
    if gguf is not None:
        found = gguf_q4.kept(model, gguf)
    elif stored is not None:
        found = _of_checkpoint(model, loading.layout_of(stored), files)
    else:
        found = _by_recipe(model, wanted) if ours else {}
    products = {name: Kept(bits, nbytes) for name, (bits, nbytes) in _together(model, found).items()}
    return products | (_head(model) if loading.rounds_head(config, wanted, wanted.device) else {})


def _together(model: Any, found: dict[str, tuple[Bits, int]]) -> dict[str, tuple[Bits, int]]:
    """Return the same with all experts of a parameter under its name."""
    parts, together = experts.parts(model), dict[str, tuple[Bits, int]]()
    for name, (bits, nbytes) in found.items():
        key = f"{parts[name].owner}.{parts[name].parameter}" if name in parts else name
        together[key] = bits, nbytes + together.get(key, (bits, 0))[1]
    return together


def _of_checkpoint(
    model: Any, layout: checkpoint.Layout, files: Sequence[Path]
) -> dict[str, tuple[Bits, int]]:
    products = hollow.all_products(model)
    names = set(hollow.products(model))
    if files:
        with closing(Tensors(files)) as tensors:
            names = checkpoint.choose(layout)(tensors, model)
    return {
        name: checkpoint.unpacked_bytes(layout, products[name].out_features, products[name].in_features)
        for name in names
    }


def _by_recipe(model: Any, wanted: EngineConfig) -> dict[str, tuple[Bits, int]]:
    recipe = loading.recipe_of(wanted)
    groups = {
        name: (each, recipe.group_of(each.in_features))
        for name, each in turns.require_fitting(model, recipe).items()
    }
    return {
        name: (recipe.bits, _grouped_bytes(linear, recipe.bits, group))
        for name, (linear, group) in groups.items()
        if group is not None
    }


def _head(model: Any) -> dict[str, Kept]:
    head = model.get_output_embeddings()
    group = fitting_group(head.weight.shape[1])
    name = next(name for name, module in model.named_modules() if module is head)
    return {} if group is None else {name: Kept(8, _grouped_bytes(head, 8, group))}


def _grouped_bytes(linear: Any, bits: int, group: int) -> int:
    """Return the bytes of a weight with scales and minima in half precision."""
    count = linear.out_features * linear.in_features
    return int(count * bits // 8 + count // group * 4)
