"""The two functions of flash-attn 2.8 that we call, in plain torch: the same arguments, shapes and rules.

So that what is built on them runs where there is no GPU. It also takes fp32 and fp64, for tests of exactness.
What the original leaves uninitialised is NaN here.
"""

import math
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_HEAD_SIZE = 256
_NO_WINDOW = (-1, -1)


class StandIn:
    """Stands in for the module `flash_attn`. Pages hold a multiple of `page_multiple` tokens: 256 there."""

    def __init__(self, page_multiple: int = 256) -> None:
        self._page_multiple = page_multiple

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = _NO_WINDOW,
        softcap: float = 0.0,
        return_softmax_lse: bool = False,
    ) -> Any:
        """Attend from q [B, Lq, H, D] to paged caches [pages, page, KV heads, D]; LSE [B, H, Lq]."""
        self._check(q, k_cache, v_cache, block_table, cache_seqlens)
        out = torch.full_like(q, math.nan)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), math.nan, dtype=_wide(q.dtype))
        for row, (length, table) in enumerate(zip(cache_seqlens.tolist(), block_table, strict=True)):
            k, v = _keys(k_cache, table, length), _keys(v_cache, table, length)
            out[row], lse[row] = _attend(q[row], k, v, softmax_scale, causal, window_size, softcap)
        return (out, lse) if return_softmax_lse else out

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = _NO_WINDOW,
        softcap: float = 0.0,
        return_attn_probs: bool = False,
        block_table: Tensor,
    ) -> Any:
        """Attend from rows of q [total, H, D] to paged k and v; LSE [H, total]."""
        self._check(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
        starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and q.shape[0] != len(starts) - 1:
            raise RuntimeError("with grouped heads and max_seqlen_q 1 each row must have one query")
        out = torch.full_like(q, math.nan)
        lse = q.new_full((q.shape[1], q.shape[0]), math.nan, dtype=_wide(q.dtype))
        for row, table in enumerate(block_table):
            queries = slice(starts[row], starts[row + 1])
            length = ends[row + 1] - ends[row]
            if queries.stop - queries.start > max_seqlen_q or length > max_seqlen_k:
                raise RuntimeError(f"row {row} is longer than max_seqlen_q or max_seqlen_k")
            keys, values = _keys(k, table, length), _keys(v, table, length)
            result = _attend(q[queries], keys, values, softmax_scale, causal, window_size, softcap)
            out[queries], lse[:, queries] = result
        return (out, lse, None) if return_attn_probs else out

    def _check(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, *lengths: Tensor) -> None:
        if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
            raise RuntimeError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}")
        if any(x.dtype != torch.int32 for x in (table, *lengths)):
            raise RuntimeError("tables and lengths must be int32")
        if any(x.stride(-1) != 1 for x in (q, k, v, table)):
            raise RuntimeError("the last dimension must be contiguous")
        size = q.shape[-1]
        if size > _MOST_HEAD_SIZE or size % 8 or not size == k.shape[-1] == v.shape[-1]:
            raise RuntimeError(f"head sizes {size}, {k.shape[-1]}, {v.shape[-1]}")
        if q.shape[-2] % k.shape[2]:
            raise RuntimeError(f"{q.shape[-2]} heads over {k.shape[2]} KV heads")
        if k.shape[1] % self._page_multiple:
            raise RuntimeError(f"pages of {k.shape[1]} tokens")


def _keys(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the first `length` tokens of a table's pages [length, heads, size]."""
    pages = -(-length // cache.shape[1])
    return cache[table[:pages].long()].flatten(0, 1)[:length]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return [n, H, D] and the LSE [H, n] of one row; the last query is at the last key."""
    wide = _wide(q.dtype)
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.to(wide).repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.to(wide), k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    left, right = (window[0], 0) if causal else window
    at = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    keys = torch.arange(k.shape[0])
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    if right >= 0:
        hidden |= keys > at + right
    if left >= 0:
        hidden |= keys < at - left
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1) if k.shape[0] else scores.new_full(scores.shape[:2], -math.inf)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(wide).min)[..., None])
    out = torch.einsum("hnl,lhd->nhd", weights, v).to(q.dtype)
    return out, lse.masked_fill(lse == -math.inf, math.inf)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
