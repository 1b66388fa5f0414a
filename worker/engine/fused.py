"""The decoder layer that most models share, in few operations: RMS norm, grouped attention with rotary
embedding, and a gated MLP, each added to the residual stream.

Llama, Qwen 2 and 3, Mistral and many more have it. Whether a layer *is* one is decided by its parts' names
and then by trying it: the guards compare the logits with those of the model's own code.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker.engine import interface, packed
from worker.engine.attention import Rotation, Scoring
from worker.engine.native import library
from worker.engine.native.decoder import NativeDecoder
from worker.engine.native.library import Kernels
from worker.engine.packed import PackedGate, PackedLinear

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def fuse_all(model: nn.Module, scorings: list[Scoring]) -> Iterator[packed.Replaced]:
    """Replace the layers that look like such a one; yield what was there."""
    rotary = Rotary()
    last = len(scorings) - 1
    for parent in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for name, layer in list(parent.named_children()):
            if _looks_fusable(layer):
                setattr(
                    parent, name, FusedLayer(layer, scorings[_index(layer)], rotary, _index(layer) == last)
                )
                yield parent, name, layer


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


class FusedLayer(nn.Module):
    """A decoder layer [1, T, hidden] -> [1, T, hidden] with merged, packed weights, called as the original
    is.
    """

    def __init__(self, layer: Any, scoring: Scoring, rotary: Rotary, is_last: bool) -> None:
        super().__init__()
        attention = layer.self_attn
        self._layer_index = _index(layer)
        self._scoring = scoring
        self._rotary = rotary
        self._size = attention.head_dim
        self._epsilon = _epsilon(layer.input_layernorm)
        self._mlp_epsilon = _epsilon(layer.post_attention_layernorm)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._counts = [p.weight.shape[0] // self._size for p in projections]
        weight = torch.cat([p.weight.data for p in projections])
        bias = (
            torch.cat([_bias(p) for p in projections])
            if any(p.bias is not None for p in projections)
            else None
        )
        self._qkv = PackedLinear(weight * _norm_weight(layer.input_layernorm, weight.shape[1]), bias)
        self._output = _packed(attention.o_proj)
        self._head_norms, self._head_epsilon = self._join_head_norms(attention)
        self._mlp = _mlp(layer)
        self._kernels = library.kernels(weight.dtype, weight.device)
        self._is_last = is_last
        self._whole = self._join_all()

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        x = hidden_states[0]  # [T, hidden]
        decode = interface.decoding()
        if self._whole is not None and decode is not None and x.is_contiguous():
            decode(self._whole, x, *self._rotary.halves(self._size, *position_embeddings), self._is_last)
            return hidden_states
        q, k, _ = self._counts
        heads = self._qkv(x, _inverse_rms(x, self._epsilon, self._kernels))
        heads = heads.view(x.shape[0], -1, self._size)  # [T, q + k + v, D]
        cos, sin = self._rotary.halves(self._size, *position_embeddings)
        rotation = Rotation(cos, sin, self._head_norms, self._head_epsilon)
        out = interface.attend(
            self._layer_index, heads[:, :q], heads[:, q : q + k], heads[:, q + k :], self._scoring, rotation
        )
        x = self._output.plus(out.reshape(x.shape[0], -1), x)
        return self._mlp(x, self._mlp_epsilon, self._kernels)[None]

    def _join_all(self) -> NativeDecoder | None:
        """Return the whole layer as one call where our kernels have all of it."""
        mlp = self._mlp
        if self._kernels is None or not isinstance(mlp, _GatedMlp) or mlp.gate is None:
            return None
        q, k, v = self._counts
        return NativeDecoder(
            self._kernels,
            self._layer_index,
            (q, k, v),
            self._scoring,
            (self._qkv, self._output, mlp.gate, mlp.down),
            (self._epsilon, self._mlp_epsilon),
            self._head_norms,
            self._head_epsilon,
        )

    def _join_head_norms(self, attention: Any) -> tuple[Tensor | None, float]:
        """Return the weights [q + k heads, D] of norms over single heads, and their epsilon."""
        if not hasattr(attention, "q_norm"):
            return None, 0.0
        q, k, _ = self._counts
        norms = [_norm_weight(norm, self._size) for norm in (attention.q_norm, attention.k_norm)]
        joined = torch.cat([norms[0].expand(q, -1), norms[1].expand(k, -1)])
        return joined, _epsilon(attention.q_norm)


class _GatedMlp(nn.Module):
    """x + down(act(gate(x)) * up(x)), with the norm's weight in gate and up."""

    def __init__(self, mlp: Any, norm: Tensor) -> None:
        super().__init__()
        self.down = _packed(mlp.down_proj)
        self.gate = PackedGate(mlp.gate_proj, mlp.up_proj, norm) if _is_silu(mlp.act_fn) else None
        if self.gate is None:
            self._gate_alone, self._up_alone = _packed(mlp.gate_proj, norm), _packed(mlp.up_proj, norm)
        self._activation: Callable[[Tensor], Tensor] = mlp.act_fn

    def forward(self, x: Tensor, epsilon: float, kernels: Kernels | None) -> Tensor:
        scale = _inverse_rms(x, epsilon, kernels)
        if self.gate is not None:
            return self.down.plus(self.gate(x, scale), x)
        return self.down.plus(self._activation(self._gate_alone(x, scale)) * self._up_alone(x, scale), x)


class _OwnMlp(nn.Module):
    """x + mlp(norm(x)) with the model's own modules, such as a mixture of experts."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._norm, self._mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x + self._mlp(self._norm(x)[None])[0]


def _mlp(layer: Any) -> nn.Module:
    if {name for name, _ in layer.mlp.named_children()} != _MLP:
        return _OwnMlp(layer)
    return _GatedMlp(
        layer.mlp, _norm_weight(layer.post_attention_layernorm, layer.mlp.gate_proj.weight.shape[1])
    )


def _looks_fusable(layer: Any) -> bool:
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attention = {name for name, _ in layer.self_attn.named_children()}
    if attention not in (_ATTENTION, _ATTENTION | _HEAD_NORMS) or not hasattr(layer.self_attn, "head_dim"):
        return False
    linear = [getattr(layer.self_attn, name) for name in _ATTENTION]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    return all(type(module) is nn.Linear for module in linear) and all(_epsilon(norm) > 0 for norm in norms)


def _index(layer: Any) -> int:
    return int(layer.self_attn.layer_idx)


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", 0.0) or getattr(norm, "eps", 0.0) or 0.0)


@torch.no_grad()
def _norm_weight(norm: Any, size: int) -> Tensor:
    """Return by what a norm multiplies what it has normed [size], whether it stores w or w - 1."""
    ones = torch.ones(1, size, dtype=norm.weight.dtype, device=norm.weight.device)
    weight: Tensor = norm(ones)[0] * (1 + _epsilon(norm)) ** 0.5
    return weight


def _inverse_rms(x: Tensor, epsilon: float, kernels: Kernels | None) -> Tensor:
    """Return 1 / root mean square [T] of x [T, D] (RMSNorm, Zhang & Sennrich 2019)."""
    if kernels is not None:
        return kernels.inverse_rms(x, epsilon)
    norm = torch.linalg.vector_norm(x, dim=-1)
    return norm.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()


def _bias(linear: Any) -> Tensor:
    """Return the bias [outputs], zeros where there is none."""
    weight: Tensor = linear.weight
    return weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.data


def _packed(linear: Any, norm: Tensor | None = None) -> PackedLinear:
    weight = linear.weight.data if norm is None else linear.weight.data * norm
    return PackedLinear(weight, None if linear.bias is None else linear.bias.data)


def _is_silu(activation: Any) -> bool:
    sample = torch.linspace(-4, 4, 9)
    return bool(torch.equal(activation(sample), F.silu(sample)))
