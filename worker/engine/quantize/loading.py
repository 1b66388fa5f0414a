"""Models with quantised weights, of whatever kind: one way in for the loader."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.quantizers.auto import AutoHfQuantizer

from worker.engine import parallel
from worker.engine.quantize import (
    apply,
    awq,
    cache,
    checkpoint,
    compressed,
    filling,
    gptq,
    hollow,
    own,
    sampled,
)
from worker.engine.quantize.recipe import Recipe
from worker.engine.quantize.tensors import Tensors
from worker.engine.quantize.weights import GroupedWeight
from worker.engine.types import EngineConfig

log = logging.getLogger(__name__)
_LAYOUTS: dict[str, Callable[[dict[str, Any]], checkpoint.Layout]] = {
    "gptq": gptq.Gptq.read,
    "awq": awq.Awq.read,
    "compressed-tensors": compressed.Compressed.read,
    own.METHOD: own.Own.read,
}


def is_wanted(config: Any, wanted: EngineConfig, gguf: bool) -> bool:
    """Tell whether a model comes quantised in a layout that is ours to read, or is to be quantised.

    Raises ValueError in one line for what cannot be.
    """
    if gguf:
        if wanted.quantize is not None:
            raise ValueError("a GGUF file keeps the bits it has; LONGHAUL_QUANTIZE is for safetensors")
        return False
    found = stored(config)
    if found is None:
        ours = wanted.quantize is not None
    else:
        method = found.get("quant_method")
        if wanted.quantize is not None:
            raise ValueError(
                f"it is quantised already ({method}); LONGHAUL_QUANTIZE is for models that are not"
            )
        ours = method in _LAYOUTS
        if not ours and not AutoHfQuantizer.supports_quant_method(
            found
        ):  # it would be read as if it were not
            raise ValueError(f"how its weights are quantised is not known: {method!r}")
    return ours


def load(
    auto: Any,
    location: str,
    config: Any,
    options: dict[str, Any],
    share: dict[str, Any],
    wanted: EngineConfig,
) -> Any:
    """Load a model with IntLinear in place of what is quantised, or is to be; raises ValueError.

    With the options of a `share`, one rank's part of it.
    """
    found = stored(config)
    if found is None:
        recipe = recipe_of(wanted)

        def load_hollow(options: dict[str, Any]) -> tuple[Any, Tensors]:
            return hollow.load(auto, location, options, apply.choose(recipe), wanted.pickle_weights)

        model, tensors = load_hollow(options | share)
        _by_recipe(model, tensors, recipe, lambda: load_hollow(options))
    else:
        layout = layout_of(found)
        del config.quantization_config
        options = options | share | {"config": config}
        model, tensors = hollow.load(auto, location, options, checkpoint.choose(layout), pickles=False)
        for names in hollow.empty(model).values():
            filling.fill(model, {name: checkpoint.unpack(layout, tensors, name) for name in names})
    tensors.close()
    return model


def recipe_of(wanted: EngineConfig) -> Recipe:
    """Return how an engine is to quantise."""
    bits = 4 if wanted.quantize == "int4" else 8
    return Recipe(bits, wanted.quantize_group, wanted.quantize_method)  # type: ignore[arg-type]


def _by_recipe(
    model: Any, tensors: Tensors, recipe: Recipe, load_whole: Callable[[], tuple[Any, Tensors]]
) -> None:
    with cache.entry(tensors.files, recipe) as entry:
        weights = entry.read(model)
        if weights is None:
            log.info(
                "quantising", extra={"bits": recipe.bits, "group": recipe.group, "method": recipe.method}
            )
            if not parallel.is_share(model):
                entry.write(_quantised(model, tensors, recipe))
                return
            # A share cannot run by itself: one rank makes it with a whole model, while the others wait here.
            weights = _quantised_whole(load_whole, recipe)
            entry.write(weights)
    filling.fill(model, weights)


def _quantised_whole(
    load_whole: Callable[[], tuple[Any, Tensors]], recipe: Recipe
) -> dict[str, GroupedWeight]:
    model, tensors = load_whole()
    try:
        return _quantised(model, tensors, recipe, in_place=False)
    finally:
        tensors.close()
        del model
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # what is free is about to be measured


def _quantised(
    model: Any, tensors: Tensors, recipe: Recipe, in_place: bool = True
) -> dict[str, GroupedWeight]:
    ids = _sampled(model, tensors) if recipe.method == "sampled" else None
    return apply.quantize(model, tensors, recipe, ids, in_place=in_place)


def _sampled(model: Any, tensors: Tensors) -> Tensor | None:
    """Return tokens to run a model over; None, with a log line, for one that does not run over them alone."""
    try:
        return sampled.ids(model, tensors)
    except Exception as error:  # a model's own code may raise anything
        log.warning("rounding to the nearest: the model does not run over tokens alone: %r", error)
        return None


def layout_of(found: dict[str, Any]) -> checkpoint.Layout:
    """Return the layout that a `quantization_config` of ours to read says; raises ValueError."""
    method = found["quant_method"]
    try:
        return _LAYOUTS[method](found)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its quantization_config is not as {method} has it: {error!r}") from error


def rounds_head(config: Any, wanted: EngineConfig, device: str) -> bool:
    """Tell whether the head is rounded to 8 bits on a device of this type.

    Where nobody chose, that of layers which we rounded is, if the device multiplies with it as it is.
    """
    if wanted.quantize_head != "auto":
        return wanted.quantize_head == "int8"
    method = (stored(config) or {}).get("quant_method")
    return device == "cpu" and (wanted.quantize is not None or method == own.METHOD)


def stored(config: Any) -> dict[str, Any] | None:
    """Return what a config says of quantised weights."""
    found = getattr(config, "quantization_config", None)
    if found is not None and not isinstance(found, dict):
        found = found.to_dict()
    if found is not None and not isinstance(found.get("quant_method"), str):
        raise ValueError(f"the quant_method of its quantization_config is {found.get('quant_method')!r}")
    return found
