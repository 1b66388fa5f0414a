"""Quantised weights kept on disk, so that the second load of a model takes no time."""

import fcntl
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from worker.engine import smollm2
from worker.engine.quantize import checkpoint, own, turns
from worker.engine.quantize.recipe import Recipe
from worker.engine.quantize.tensors import Tensors
from worker.engine.quantize.weights import GroupedWeight

log = logging.getLogger(__name__)
VERSION = 1
"""Raised when the same recipe makes other weights."""


class Entry:
    """The quantised weights of certain files by a certain recipe, which are there or not yet."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path, self._recipe, self._layout = path, recipe, own.Own(recipe.bits, recipe.group)

    def read(self, model: nn.Module) -> dict[str, GroupedWeight] | None:
        """Return the weights of a model's products; None if there are none, or they are damaged."""
        if not self.path.is_file():
            return None
        try:
            with closing(Tensors([self.path])) as tensors:
                products = turns.fitting(model, self._recipe)
                for name, product in products.items():
                    checkpoint.check(self._layout, tensors, name, product)
                weights = {name: checkpoint.unpack(self._layout, tensors, name) for name in products}
                if tensors.metadata.get("checksum") != _checksum(own.tensors_of(weights)):
                    raise ValueError("its checksum is another one")
                return weights
        except Exception as error:  # whatever a damaged file may cause
            log.warning("quantised weights are made anew: %s: %s", self.path, error)
            return None

    def write(self, weights: dict[str, GroupedWeight]) -> None:
        """Keep weights; a crash in between leaves nothing behind that `read` would take."""
        scratch, tensors = self.path.with_suffix(".part"), own.tensors_of(weights)  # the entry is locked
        try:
            save_file(tensors, scratch, {"checksum": _checksum(tensors)})
            os.replace(scratch, self.path)
        finally:
            scratch.unlink(missing_ok=True)


def directory() -> Path:
    """Return where weights are kept: beside the models that are converted once."""
    return smollm2.cached().parent.parent / "quantized"


@contextmanager
def entry(files: Sequence[Path], recipe: Recipe) -> Iterator[Entry]:
    """Hold the entry of a checkpoint's files: another process that wants it waits, and finds it made."""
    where = directory()
    where.mkdir(parents=True, exist_ok=True)
    path = where / f"{_key(files, recipe)}.safetensors"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Entry(path, recipe)


def _checksum(tensors: dict[str, Tensor]) -> str:
    """Return what changes with any byte of tensors, their names or dtypes."""
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        data: Any = tensor.view(torch.uint8).numpy()
        total = zlib.crc32(data, total)
    return f"{total:08x}"


def _key(files: Sequence[Path], recipe: Recipe) -> str:
    """Return what changes with the files' identity, the recipe and how it is followed."""
    identities = []
    for file in files:
        real = file.resolve()  # in a hub's cache the name of the content
        facts = real.stat()
        identities.append((str(real), facts.st_size, facts.st_mtime_ns))
    everything = json.dumps([VERSION, asdict(recipe), sorted(identities)])
    return hashlib.sha256(everything.encode()).hexdigest()[:32]
