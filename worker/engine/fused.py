"""The decoder layer that most models share, in few operations: RMS norm, grouped attention with rotary
embedding, and a gated MLP, each added to the residual stream.

Llama, Qwen 2 and 3, Mistral and many more have it. Whether a layer *is* one is decided by its parts' names
and then by trying it: the guards compare the logits with those of the model's own code.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine import interface, packed, parts
from worker.engine.attention import Heads, Rotation, Scoring
from worker.engine.merged import MergedLayer
from worker.engine.native import library
from worker.engine.native.decoder import NativeDecoder
from worker.engine.native.library import Kernels
from worker.engine.packed import PackedGate, PackedLinear
from worker.engine.parts import Rotary
from worker.engine.pointwise import PLAIN, Pointwise


def fuse_all(
    model: nn.Module, scorings: list[Scoring], operations: Pointwise = PLAIN
) -> Iterator[packed.Replaced]:
    """Replace the layers that look like such a one; yield what was there."""
    faster: nn.Module
    rotary, last = Rotary(), len(scorings) - 1
    for parent in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for name, layer in list(parent.named_children()):
            if parts.looks_fusable(layer):
                scoring = scorings[parts.index(layer)]
                if parts.can_pack(layer):
                    faster = FusedLayer(layer, scoring, rotary, parts.index(layer) == last)
                else:
                    faster = MergedLayer(layer, scoring, rotary, operations)
                setattr(parent, name, faster)
                yield parent, name, layer


class FusedLayer(nn.Module):
    """A decoder layer [1, T, hidden] -> [1, T, hidden] with merged, packed weights, called as the original
    is.
    """

    def __init__(self, layer: Any, scoring: Scoring, rotary: Rotary, is_last: bool) -> None:
        super().__init__()
        attention = layer.self_attn
        self._layer_index = parts.index(layer)
        self._scoring = scoring
        self._rotary = rotary
        self._size = attention.head_dim
        self._epsilon = parts.epsilon(layer.input_layernorm)
        self._mlp_epsilon = parts.epsilon(layer.post_attention_layernorm)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._counts = [projection.out_features // self._size for projection in projections]
        norm = parts.norm_weight(layer.input_layernorm, attention.q_proj.in_features)
        self._qkv = PackedLinear(*parts.join(projections), norm)
        self._output = _packed(attention.o_proj)
        self._head_norms, self._head_epsilon = parts.join_head_norms(
            attention, self._counts, parts.norm_weight
        )
        self._mlp = _mlp(layer)
        self._kernels = library.kernels(norm.dtype, norm.device)
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
        split = heads[:, :q], heads[:, q : q + k], heads[:, q + k :]
        out = interface.attend(Heads(self._layer_index, *split, self._scoring, rotation))
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


class _GatedMlp(nn.Module):
    """x + down(act(gate(x)) * up(x)), with the norm's weight in gate and up."""

    def __init__(self, mlp: Any, norm: Tensor) -> None:
        super().__init__()
        self.down = _packed(mlp.down_proj)
        self.gate = PackedGate(mlp.gate_proj, mlp.up_proj, norm) if parts.is_silu(mlp.act_fn) else None
        if self.gate is None:
            self._gate_alone, self._up_alone = _packed(mlp.gate_proj, norm), _packed(mlp.up_proj, norm)
        self._activation: Callable[[Tensor], Tensor] = mlp.act_fn

    def forward(self, x: Tensor, epsilon: float, kernels: Kernels | None) -> Tensor:
        scale = _inverse_rms(x, epsilon, kernels)
        if self.gate is not None:
            return self.down.plus(self.gate(x, scale), x)
        return self.down.plus(self._activation(self._gate_alone(x, scale)) * self._up_alone(x, scale), x)


def _mlp(layer: Any) -> nn.Module:
    if not parts.is_gated(layer.mlp):
        return parts.OwnMlp(layer)
    return _GatedMlp(
        layer.mlp, parts.norm_weight(layer.post_attention_layernorm, layer.mlp.gate_proj.in_features)
    )


def _inverse_rms(x: Tensor, epsilon: float, kernels: Kernels | None) -> Tensor:
    """Return 1 / root mean square [T] of x [T, D] (RMSNorm, Zhang & Sennrich 2019)."""
    if kernels is not None:
        return kernels.inverse_rms(x, epsilon)
    norm = torch.linalg.vector_norm(x, dim=-1)
    return norm.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()


def _packed(linear: Any, norm: Tensor | None = None) -> PackedLinear:
    return PackedLinear(*packed.content(linear), norm)
