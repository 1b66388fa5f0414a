"""How a model's last hidden states become one vector, as its sentence-transformers files say.

Such a model lists its modules in modules.json: the transformer, a Pooling, then maybe Dense layers and a
Normalize. Without that file a causal LM's vector is its last token's, which alone has seen the whole text;
any other model's is the mean over its tokens, as sentence-transformers takes it then. Both have length 1, as
clients of the endpoint expect who take a dot product for the cosine.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.hub import cached_file

from worker.engine import source

# In the order in which sentence-transformers joins those of a model that has several.
_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.amax(0),
    "mean": lambda hidden: hidden.mean(0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(0) / hidden.shape[0] ** 0.5,
    "weightedmean": lambda hidden: _ramp(hidden) @ hidden,
    "lasttoken": lambda hidden: hidden[-1],
}
_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


class Unsupported(Exception):
    """Why a model's files ask for something else than what is known here."""


@dataclass(frozen=True)
class Pooling:
    """How hidden states become a vector: by `modes`, joined, then `layers` one after the other."""

    modes: tuple[str, ...]
    layers: tuple[Callable[[Tensor], Tensor], ...] = ()

    def wanted(self, lengths: list[int]) -> list[int] | None:
        """Return which tokens of texts side by side are looked at; None: all."""
        ends = list(accumulate(lengths))
        if self.modes == ("lasttoken",):
            return [end - 1 for end in ends]
        if self.modes == ("cls",):
            return [end - length for end, length in zip(ends, lengths, strict=True)]
        return None

    def __call__(self, texts: list[Tensor]) -> Tensor:
        """Return vectors [B, size] of texts, each the hidden states [n, D] of its wanted tokens."""
        wide = [text if text.dtype == torch.float64 else text.float() for text in texts]
        pooled = torch.stack([torch.cat([_MODES[mode](text) for mode in self.modes]) for text in wide])
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


class Dense:
    """A linear layer [outputs, inputs] with an activation, on the pooled vector."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self._weight, self._bias = weight, bias
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._weight.to(x), None if self._bias is None else self._bias.to(x)
        return self._activation(F.linear(x, weight, bias))


def normalize(vectors: Tensor) -> Tensor:
    """Return vectors [B, size] of length 1."""
    return F.normalize(vectors, dim=-1)


LAST = Pooling(("lasttoken",), (normalize,))
MEAN = Pooling(("mean",), (normalize,))


def read(location: str, options: dict[str, Any], default: Pooling, pickles: bool = False) -> Pooling:
    """Return the pooling of a hub id or directory, the default without modules.json; raises Unsupported.

    `pickles`: layers may lie in a pytorch_model.bin.
    """
    modules = _json(location, "modules.json", options)
    if modules is None:
        return default
    modes: tuple[str, ...] = ()
    layers: list[Callable[[Tensor], Tensor]] = []
    for position, module in enumerate(modules):
        kind, path = str(module["type"]).rpartition(".")[2], str(module.get("path") or "")
        if kind == "Transformer" and position == 0:
            continue
        if kind == "Pooling" and not modes:
            modes = _modes(_json(location, f"{path}/config.json", options) or {})
        elif kind == "Normalize" and modes:
            layers.append(normalize)
        elif kind == "Dense" and modes:
            layers.append(_dense(location, path, options, pickles))
        else:
            raise Unsupported(f"modules.json has a {module['type']} in place {position}")
    if not modes:
        raise Unsupported("modules.json has no Pooling")
    return Pooling(modes, tuple(layers))


def _modes(config: dict[str, Any]) -> tuple[str, ...]:
    wanted = config.get("pooling_mode")  # in newer files, instead of a key for each mode
    if wanted is None:
        found = [mode for mode, key in _KEYS.items() if config.get(key)]
        unknown = {key for key in config if key.startswith("pooling_mode_")} - {*_KEYS.values()}
        unknown = {key for key in unknown if config[key]}
    else:
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        found, unknown = [mode for mode in _MODES if mode in names], set(names) - {*_MODES}
    if unknown or not found:
        raise Unsupported(f"a pooling of {', '.join(sorted(unknown)) or 'no mode'}")
    return tuple(found)


def _dense(location: str, path: str, options: dict[str, Any], pickles: bool) -> Dense:
    config = _json(location, f"{path}/config.json", options) or {}
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    names = {config.get(f"module_{side}_name") for side in ("input", "output")}
    if activation not in _ACTIVATIONS or not names <= {None, "sentence_embedding"}:
        raise Unsupported(f"a Dense layer with {activation} on {names}")
    weights = _weights(location, path, options, pickles)
    return Dense(weights["linear.weight"], weights.get("linear.bias"), activation)


def _weights(location: str, path: str, options: dict[str, Any], pickles: bool) -> dict[str, Tensor]:
    file = _file(location, f"{path}/model.safetensors", options)
    if file is not None:
        from safetensors.torch import load_file

        return load_file(file)
    if not pickles:
        raise Unsupported(source.no_safetensors(path))
    file = _file(location, f"{path}/pytorch_model.bin", options)
    if file is None:
        raise Unsupported(f"{path} has no weights")
    weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return weights


def _json(location: str, name: str, options: dict[str, Any]) -> Any:
    file = _file(location, name, options)
    return None if file is None else json.loads(Path(file).read_text())


def _file(location: str, name: str, options: dict[str, Any]) -> str | None:
    """Return the path of a model's file, fetched if it is on the hub; None where there is none."""
    if os.path.isdir(location):
        path = Path(location, name)
        return str(path) if path.is_file() else None
    hub = {key: value for key, value in options.items() if key in ("revision", "local_files_only")}
    found: str | None = cached_file(location, name, _raise_exceptions_for_missing_entries=False, **hub)
    return found


def _ramp(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, hidden.shape[0] + 1, dtype=hidden.dtype, device=hidden.device)
    return weights / weights.sum()
