"""The decoder layer of `fused` where weights stay as they are: half precision, and GPUs.

q/k/v are one product and gate/up another; a norm stays apart from the weight behind it, which to multiply
would round once more. Everything between products is float32 inside (see `pointwise`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker.engine import interface, packed, parts, precision
from worker.engine.attention import Heads, Scoring
from worker.engine.parts import Rotary
from worker.engine.pointwise import Pointwise
from worker.engine.quantize import linear as integer
from worker.engine.quantize.linear import IntLinear


class MergedLinear(nn.Module):
    """Several linear layers x [..., inputs] -> [..., outputs of all] in one product.

    Their weights become views of the merged one: it takes no memory more, and they still work.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.weight = _join([linear.weight for linear in linears])
        biased = any(linear.bias is not None for linear in linears)
        for linear in linears:
            if biased and linear.bias is None:
                linear.bias = nn.Parameter(parts.bias(linear), requires_grad=False)
        self.bias = _join([linear.bias for linear in linears]) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _merged(linears: list[Any]) -> nn.Module:
    if isinstance(linears[0], IntLinear):
        return packed.fastest(integer.join(linears))
    return MergedLinear(linears)


@torch.no_grad()
def _join(parameters: list[Any]) -> nn.Parameter:
    if len(parameters) == 1:
        return nn.Parameter(parameters[0].data, requires_grad=False)
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = view  # which frees what was there: a model is never in memory twice
    return nn.Parameter(joined, requires_grad=False)


class MergedLayer(nn.Module):
    """A decoder layer [1, T, hidden] -> [1, T, hidden], called as the original is."""

    def __init__(self, layer: Any, scoring: Scoring, rotary: Rotary, operations: Pointwise) -> None:
        super().__init__()
        attention = layer.self_attn
        self._layer_index = parts.index(layer)
        self._scoring = scoring
        self._rotary = rotary
        self._operations = operations
        self._size = attention.head_dim
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._counts = [projection.out_features // self._size for projection in projections]
        self._qkv = _merged(projections)
        self._output = _merged([attention.o_proj])
        self._norm = parts.wide_norm_weight(layer.input_layernorm, attention.q_proj.in_features)
        self._epsilon = parts.epsilon(layer.input_layernorm)
        self._head_norm, self._head_epsilon = parts.join_head_norms(
            attention, self._counts, parts.wide_norm_weight
        )
        self._mlp = _GatedMlp(layer, operations) if parts.is_gated(layer.mlp) else parts.OwnMlp(layer)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        x = hidden_states[0]  # [T, hidden]
        q, k, _v = self._counts
        heads = self._qkv(self._operations.norm(x, self._norm, self._epsilon))
        heads = heads.view(x.shape[0], -1, self._size)  # [T, q + k + v, D]
        cos, sin = self._rotary.halves(self._size, *position_embeddings)
        rotated = self._operations.rotate(heads[:, : q + k], cos, sin, self._head_norm, self._head_epsilon)
        split = rotated[:, :q], rotated[:, q:], heads[:, q + k :]
        out = interface.attend(Heads(self._layer_index, *split, self._scoring))
        x = x + self._output(out.reshape(x.shape[0], -1))
        return self._mlp(x)[None]


class _GatedMlp(nn.Module):
    """x + down(act(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, layer: Any, operations: Pointwise) -> None:
        super().__init__()
        mlp = layer.mlp
        self._operations = operations
        self._norm = parts.wide_norm_weight(layer.post_attention_layernorm, mlp.gate_proj.in_features)
        self._epsilon = parts.epsilon(layer.post_attention_layernorm)
        self._gate_up = _merged([mlp.gate_proj, mlp.up_proj])
        self._down = _merged([mlp.down_proj])
        self._activated = operations.gate if parts.is_silu(mlp.act_fn) else _gated_by(mlp.act_fn)

    def forward(self, x: Tensor) -> Tensor:
        both = self._gate_up(self._operations.norm(x, self._norm, self._epsilon))
        return x + self._down(self._activated(both))


def _gated_by(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        a, b = x.to(precision.wide(x.dtype)).chunk(2, -1)
        return (activation(a) * b).to(x.dtype)

    return gated
