"""A model's directory with quantised weights, which loads like any other."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from jobs import errors
from worker.engine import heads, loader, precision
from worker.engine.quantize import apply, experts, hollow, own, sampled
from worker.engine.quantize.recipe import Recipe
from worker.engine.quantize.tensors import Tensors
from worker.engine.quantize.turns import Progress
from worker.engine.source import locate
from worker.engine.types import EngineConfig

_SEQUENCES, _LENGTH = 32, 512
_FEWEST_TOKENS = 256
_COPIED = {".json", ".jinja", ".md", ".model", ".py", ".tiktoken", ".txt"}


def write(
    source: str, target: Path, recipe: Recipe, text: str | None, config: EngineConfig, progress: Progress
) -> None:
    """Quantise a source by a recipe, with `text` to calibrate by, and write it to a new directory.

    That is there when it is whole. Raises ModelUnavailable, and Conflict where something is already.
    """
    if target.exists():
        raise errors.Conflict(f"{target} is there already.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        raise errors.LonghaulError(f"{target} cannot be written: {error.strerror}.") from error
    with scratch:
        made = Path(scratch.name) / target.name
        made.mkdir()
        try:
            _write(source, made, recipe, text, config, progress)
        except Exception as error:  # a model's own code and files may raise anything
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise errors.ModelUnavailable(name=source, source=source, reason=reason) from error
        made.rename(target)


def _write(
    source: str, made: Path, recipe: Recipe, text: str | None, wanted: EngineConfig, progress: Progress
) -> None:
    location, options = locate(source, wanted)
    if "gguf_file" in options:
        raise ValueError("a GGUF file keeps the bits it has")
    config = AutoConfig.from_pretrained(location, **options)
    if getattr(config, "quantization_config", None):
        raise ValueError("it is quantised already")
    tokenizer = AutoTokenizer.from_pretrained(location, **options)
    given = None if text is None else sequences(tokenizer(text, verbose=False).input_ids)
    device = loader.pick_device(wanted.device)
    loader.use_all_cores()
    options |= {"dtype": precision.pick_dtype(wanted.dtype, getattr(config, "dtype", None), device)}
    auto = heads.auto_class(config, options, "auto")
    model, tensors = hollow.load(auto, location, options, apply.choose(recipe), wanted.pickle_weights)
    model = model.to(device).eval()
    if given is None and recipe.method == "sampled":
        given = sampled.ids(model, tensors)
    weights = apply.quantize(model, tensors, recipe, given, progress)
    _save(made, tensors, weights, recipe)
    tensors.close()


def sequences(ids: list[int]) -> Tensor:
    """Return parts [sequences, tokens] of a text, spread evenly over it; raises ValueError if it is short."""
    if len(ids) < _FEWEST_TOKENS:
        raise ValueError(f"{len(ids)} tokens are too few to calibrate by; {_FEWEST_TOKENS} are the fewest")
    length = min(_LENGTH, len(ids))
    count = min(_SEQUENCES, len(ids) // length)
    starts = [i * (len(ids) - length) // max(1, count - 1) for i in range(count)]
    return torch.tensor([ids[start : start + length] for start in starts])


def _save(made: Path, tensors: Tensors, weights: dict[str, Any], recipe: Recipe) -> None:
    """Write the weights, and all else as it is in the source."""
    full = {whole for name in weights for whole in _full(tensors, name)}
    others = {name: tensors.read(name) for name in tensors.names if name not in full}
    save_file(others | own.tensors_of(weights), made / "model.safetensors", {"format": "pt"})
    source = tensors.files[0].parent
    for path in source.rglob("*"):
        inside = path.relative_to(source)
        if path.suffix in _COPIED and not path.name.endswith(".index.json") and not _hidden(inside):
            (made / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, made / inside)
    (made / "model.safetensors").chmod(0o644)  # it is made for its owner alone
    facts = json.loads((made / "config.json").read_text())
    facts["quantization_config"] = own.config_of(recipe)
    (made / "config.json").write_text(json.dumps(facts, indent=2) + "\n")


def _full(tensors: Tensors, name: str) -> list[str]:
    """Return the names of the full weights that a quantised one replaces; raises ValueError."""
    if f"{name}.weight" in tensors:
        return [f"{name}.weight"]
    owner, parameter = experts.weight_of(name)
    source = tensors.sources.get(f"{owner}.{parameter}")
    if source is None:
        raise ValueError(f"{name}.weight is not in its safetensors by this name")
    return source.all_names


def _hidden(inside: Path) -> bool:
    return any(part.startswith(".") for part in inside.parts)
