"""KV in pages: fixed runs of positions, counted, shared by reference, copied when written to."""

import torch
from torch import Tensor

from worker.engine import kv

PAGE_TOKENS = 256
"""What flash-attn's paged kernels take: a multiple of this."""


class Pool:
    """Keys and values of all pages, layer by layer: `keys[layer]` [pages, page_tokens, KV heads, size].

    Page 0 is nobody's: padding is written there.
    """

    def __init__(self, layout: kv.Layout, pages: int, page_tokens: int = PAGE_TOKENS) -> None:
        self.layout = layout
        self.pages = pages
        self.page_tokens = page_tokens
        self.keys = [self._zeros(pages, heads, key) for heads, key, _ in layout.layers]
        self.values = [self._zeros(pages, heads, value) for heads, _, value in layout.layers]

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.layout.token_bytes

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages, all at once: a source may be the target of another copy."""
        for layer in (*self.keys, *self.values):
            layer.index_copy_(0, targets, layer.index_select(0, sources))

    def _zeros(self, pages: int, heads: int, size: int) -> Tensor:
        shape = (pages, self.page_tokens, heads, size)
        return torch.zeros(shape, dtype=self.layout.dtype, device=self.layout.device)
