"""The tensors of a checkpoint by name, read one at a time."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from torch import Tensor

if TYPE_CHECKING:
    from worker.engine.quantize.merging import Source


class Tensors:
    """What lies in safetensors files. Others have none, as far as this goes.

    `sources` tells what makes a model's merged weights, `joined` which quantised weights make one of its own.
    """

    def __init__(self, files: Sequence[str | Path]) -> None:
        self.files = [Path(file) for file in files]
        self.metadata: dict[str, str] = {}
        self.sources: dict[str, Source] = {}
        self.joined: dict[str, list[str]] = {}
        self._opened = ExitStack()
        self._where: dict[str, Any] = {}
        for file in self.files:
            if file.suffix == ".safetensors":
                opened = self._opened.enter_context(safe_open(file, framework="pt"))
                self._where |= dict.fromkeys(opened.keys(), opened)
                self.metadata |= opened.metadata() or {}

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def names(self) -> list[str]:
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype by the name that safetensors has for it."""
        return str(self._where[name].get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """Return a tensor; raises ValueError when it is not there."""
        if name not in self._where:
            raise ValueError(f"the checkpoint has no {name}")
        return self._where[name].get_tensor(name)

    def close(self) -> None:
        self._opened.close()
