"""The seam to transformers: its models call our attention, whatever their architecture.

What a step needs reaches the function through one module-level handler: not every model passes keyword
arguments on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from worker.engine.attention import Heads, Scoring

# transformers treats names that contain flash, sdpa or flex_attention, or start with paged, in its own ways.
NAME = "longhaul"


class Handler(Protocol):
    """Returns the attention of a layer [T, H, value size]."""

    def __call__(self, heads: Heads, /) -> Tensor: ...

    @property
    def decode(self) -> Callable[..., None] | None:
        """What runs whole layers at once, if it can: see native.attention.NativeAttention.decode."""


_handler: Handler | None = None


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Send the attention of what runs inside to a handler."""
    global _handler
    _handler = handler
    try:
        yield
    finally:
        _handler = None


def attend(heads: Heads) -> Tensor:
    """Call the current handler."""
    assert _handler is not None
    return _handler(heads)


def decoding() -> Callable[..., None] | None:
    """Return what runs whole layers now, if anything does."""
    return None if _handler is None else _handler.decode


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, H, T, D], key and value [1, KV heads, T, D] after rotary
    embedding.
    """
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        raise NotImplementedError("attention that is not causal")
    scale = options.get("scaling")
    scoring = Scoring(
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        options.get("sliding_window"),
        options.get("softcap"),
        options.get("s_aux"),
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(Heads(int(module.layer_idx), q, k, v, scoring))[None], None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)
