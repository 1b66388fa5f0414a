"""Whether a merged layer is the layer it replaces: in float32, where a wrong one cannot pass for rounding.

In half precision a whole model's logits do not tell: a residual that is scaled by 0.7, and not scaled, may be
as close as two right ways to compute them.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as trees

from worker.engine import interface, parts, runner
from worker.engine.attention import Heads, Scoring
from worker.engine.merged import MergedLayer
from worker.engine.parts import Rotary
from worker.engine.pointwise import PLAIN

_TOKENS = 8
_TOLERANCE = 1e-3
Calls = dict[nn.Module, tuple[Any, Any]]
"""The arguments, by position and by name, of each layer's call."""


class Differs(Exception):
    """Why a layer must stay as it is."""


@torch.inference_mode()
def listen(model: Any) -> Calls:
    """Return how a model calls the layers that look fusable."""
    calls: Calls = {}

    def note(layer: nn.Module, arguments: Any, named: Any) -> None:
        calls[layer] = trees.tree_map_only(Tensor, _wide, (arguments, named))

    with _listening(model, note):
        runner.dry_run(model, _TOKENS)
    return calls


@contextmanager
def _listening(model: nn.Module, note: Any) -> Iterator[None]:
    hooks = [
        layer.register_forward_pre_hook(note, with_kwargs=True)
        for layer in model.modules()
        if parts.looks_fusable(layer)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def check(layer: Any, scoring: Scoring, calls: Calls) -> None:
    """Compare a layer with what it merges to, both in float32; raises Differs.

    Takes the memory of one layer in float32.
    """
    arguments, named = calls[layer]
    # What is no gated MLP, such as a mixture of experts, stays as it is, and is most of a layer.
    left_out = {} if parts.is_gated(layer.mlp) else {id(layer.mlp): nn.Identity()}
    own = copy.deepcopy(layer, left_out).float()
    with interface.handling(Attending()):
        expected = own(*arguments, **named)
        found = MergedLayer(own, scoring, Rotary(), PLAIN)(*arguments, **named)
    gap = float((found - expected).abs().max() / expected.std().clamp(min=1e-6))
    if not gap <= _TOLERANCE:
        raise Differs(f"layer {parts.index(layer)} is off by {gap:.2g} standard deviations in float32")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


class Attending:
    """Causal attention over the tokens at hand."""

    decode = None

    def __call__(self, heads: Heads, /) -> Tensor:
        # [1, heads, T, size]
        q, k, v = (side.transpose(0, 1)[None] for side in (heads.queries, heads.keys, heads.values))
        scale = heads.scoring.scale
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
