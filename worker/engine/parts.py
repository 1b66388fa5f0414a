"""What the ways to run a decoder layer have in common: which layers they take, and what is in these."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker.engine import packed
from worker.engine.native.panels import AnyWeight
from worker.engine.quantize import linear as integer
from worker.engine.quantize.linear import IntLinear

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def looks_fusable(layer: Any) -> bool:
    """Tell by the names of its parts; who calls tries whether it is one."""
    if _names(layer) != _LAYER or not hasattr(layer.self_attn, "head_dim"):
        return False
    if _names(layer.self_attn) not in (_ATTENTION, _ATTENTION | _HEAD_NORMS):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    merges = all(len(linears) == 1 or _can_join(linears) for linears in _products(layer))
    plain = all(packed.is_plain(linear) for linears in _products(layer) for linear in linears)
    return plain and merges and all(epsilon(norm) > 0 for norm in norms)


def can_pack(layer: Any) -> bool:
    return all(packed.can_pack(linear) for linears in _products(layer) for linear in linears)


def _products(layer: Any) -> list[list[Any]]:
    """Return the linear layers of a decoder layer, those together that are one product when merged."""
    attention, mlp = layer.self_attn, layer.mlp
    products = [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
    return products + ([[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]] if is_gated(mlp) else [])


def _can_join(linears: list[Any]) -> bool:
    integers = [linear for linear in linears if isinstance(linear, IntLinear)]
    return not integers or (len(integers) == len(linears) and integer.can_join(integers))


def join(linears: list[Any]) -> tuple[AnyWeight, Tensor | None]:
    """Return the weight and bias of linear layers, one behind another."""
    if isinstance(linears[0], IntLinear):
        return packed.content(integer.join(linears))
    biased = any(linear.bias is not None for linear in linears)
    joined = torch.cat([linear.weight.data for linear in linears])
    return joined, torch.cat([bias(linear) for linear in linears]) if biased else None


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def index(layer: Any) -> int:
    return int(layer.self_attn.layer_idx)


def epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", 0.0) or getattr(norm, "eps", 0.0) or 0.0)


class Rotary:
    """The cosines and sines of a step [T, size / 2], cut out once for all layers."""

    def __init__(self) -> None:
        self._cos: Tensor | None = None
        self._halves: tuple[Tensor, Tensor] | None = None

    def halves(self, size: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first halves of cos and sin [1, T, size]; the second ones are the same."""
        if cos.shape[0] != 1 or cos.shape[2] != size:
            raise NotImplementedError(f"rotary embedding {tuple(cos.shape)} of heads of {size}")
        if cos is not self._cos or self._halves is None:
            self._cos = cos
            self._halves = cos[0, :, : size // 2].contiguous(), sin[0, :, : size // 2].contiguous()
        return self._halves


class OwnMlp(nn.Module):
    """x + mlp(norm(x)) with the model's own modules, such as a mixture of experts."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._norm, self._mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x + self._mlp(self._norm(x)[None])[0]


def is_gated(mlp: Any) -> bool:
    return _names(mlp) == _MLP


def join_head_norms(
    attention: Any, counts: list[int], weight_of: Callable[[Any, int], Tensor]
) -> tuple[Tensor | None, float]:
    """Return the weights [q + k heads, D] of norms over single heads, and their epsilon."""
    if not hasattr(attention, "q_norm"):
        return None, 0.0
    weights = [weight_of(norm, attention.head_dim) for norm in (attention.q_norm, attention.k_norm)]
    joined = torch.cat([weight.expand(count, -1) for weight, count in zip(weights, counts, strict=False)])
    return joined, epsilon(attention.q_norm)


@torch.no_grad()
def norm_weight(norm: Any, size: int) -> Tensor:
    """Return by what a norm multiplies what it has normed [size], whether it stores w or w - 1."""
    ones = torch.ones(1, size, dtype=norm.weight.dtype, device=norm.weight.device)
    weight: Tensor = norm(ones)[0] * (1 + epsilon(norm)) ** 0.5
    return weight


def wide_norm_weight(norm: Any, size: int) -> Tensor:
    """Return the same in float32, or float64 of a norm in float64."""
    if norm.weight.dtype == torch.float64:
        return norm_weight(norm, size)
    return norm_weight(copy.deepcopy(norm).float(), size)


def bias(linear: Any) -> Tensor:
    """Return the bias [outputs], zeros where there is none."""
    known: Tensor | None = linear.bias
    return linear.weight.new_zeros(linear.out_features) if known is None else known.data


def is_silu(activation: Any) -> bool:
    sample = torch.linspace(-4, 4, 9)
    return bool(torch.equal(activation(sample), F.silu(sample)))
