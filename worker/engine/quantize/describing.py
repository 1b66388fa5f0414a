"""Whether experts are what they say of themselves: a small copy of them is tried, once for each class."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker.engine.quantize import mixing

log = logging.getLogger(__name__)
_DESCRIBED = ("num_experts", "has_gate", "has_bias", "is_transposed", "config")
_HIDDEN, _BETWEEN, _TOKENS = 8, 6, 7
_known: dict[type, bool] = {}


def is_right(module: Any) -> bool:
    """Tell whether a module says how its experts are computed, and they are computed so."""
    if not all(hasattr(module, name) for name in _DESCRIBED):
        return False
    kind = type(module)
    if kind not in _known:
        try:
            with torch.device("cpu"):
                _known[kind] = _is_as_described(module)
        except Exception as error:  # a model's own code may raise anything
            log.info("experts of %s are not tried: %r", kind.__name__, error)
            _known[kind] = False
    return _known[kind]


@torch.inference_mode()
def _is_as_described(module: Any) -> bool:
    chance = torch.Generator().manual_seed(0)
    small = _small(module, chance)
    x = torch.randn(_TOKENS, _HIDDEN, generator=chance)
    weights, index = torch.rand(_TOKENS, module.num_experts, generator=chance).topk(
        min(2, module.num_experts)
    )
    first, second = mixing.parameters(module)

    def expert(number: int, rows: Tensor) -> Tensor:
        made = mixing.between(small, _product(small, first, number, rows))
        return _product(small, second, number, made)

    expected, found = small(x, index, weights), mixing.mix(small, expert, x, index, weights)
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def _small(module: Any, chance: torch.Generator) -> Any:
    """Return a copy with few, random weights, whose own code runs."""
    small: Any = copy.copy(module)
    first, second = mixing.parameters(module)
    wide = _BETWEEN * (2 if module.has_gate else 1)
    shapes = {first: (wide, _HIDDEN), second: (_HIDDEN, _BETWEEN)}
    for name in shapes:
        vars(small).pop(name, None)
    own = dict(module._parameters)
    for name, shape in shapes.items():
        given = shape[::-1] if module.is_transposed else shape
        own[name] = nn.Parameter(torch.randn(module.num_experts, *given, generator=chance))
        if module.has_bias:
            own[f"{name}_bias"] = nn.Parameter(torch.randn(module.num_experts, shape[0], generator=chance))
    modules = dict(module._modules)
    if getattr(module, "has_post_expert_norm", False):
        modules["post_expert_norm"] = nn.Tanh()
    small._parameters, small._modules = own, modules
    small.config = SimpleNamespace(_experts_implementation="eager")
    return small


def _product(small: Any, parameter: str, number: int, x: Tensor) -> Tensor:
    weight = getattr(small, parameter)[number]
    bias = getattr(small, f"{parameter}_bias")[number] if small.has_bias else None
    return F.linear(x, weight.T if small.is_transposed else weight, bias)
