"""The two functions of flash-attn 2.8.3 that we call, in plain torch: their arguments, shapes and rules.

So that what is built on them runs where there is no GPU. What the original leaves uninitialised, or writes to
a wrong place, is NaN here. Only tensors decide what is computed, as there.
"""

from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
_MOST_HEAD_SIZE = 256
_ALL = (-1, -1)


class StandIn:
    """Stands in for the module `flash_attn`, for caches in pages.

    Pages hold a multiple of `page_multiple` tokens: 256 there. `dtypes` are `HALVES` there; the others are
    for tests of exactness. Raises RuntimeError for what the original refuses, and NotImplementedError for
    what it does and this does not.
    """

    def __init__(
        self,
        page_multiple: int = 256,
        dtypes: tuple[torch.dtype, ...] = (*HALVES, torch.float32, torch.float64),
    ) -> None:
        self._page_multiple = page_multiple
        self._dtypes = dtypes

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Any = None,
        v: Any = None,
        rotary_cos: Any = None,
        rotary_sin: Any = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Any = None,
        cache_leftpad: Any = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = _ALL,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Any = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        """Attend from q [B, Lq, H, D] to caches [pages, page, KV heads, D]; return [B, Lq, H, D] and the LSE
        [B, H, Lq].

        Row i has the first `cache_seqlens[i]` keys of its pages `block_table[i]`. Without keys a query gets 0
        and LSE +inf.
        """
        _only_defaults(k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
        if cache_seqlens is None or block_table is None or num_splits:
            raise NotImplementedError("caches without pages, or split as told")
        self._check(q, k_cache, v_cache, block_table, q.shape[0])
        _check_integers("cache_seqlens", cache_seqlens, q.shape[0])
        scores = _Scoring(softmax_scale, causal and q.shape[1] > 1, window_size, softcap)
        whole = torch.full_like(cache_seqlens, q.shape[1])
        out, lse = scores.attend(q, whole, k_cache, v_cache, block_table, cache_seqlens)
        beyond = cache_seqlens > block_table.shape[1] * k_cache.shape[1]
        out = out.masked_fill(beyond[:, None, None, None], torch.nan)
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
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = _ALL,
        softcap: float = 0.0,
        alibi_slopes: Any = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Any:
        """Attend from rows of q [total, H, D] to caches k and v [pages, page, KV heads, D]; return
        [total, H, D], the LSE [H, total] and nothing.

        Row i has the queries `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]` and as many of the first keys of its
        pages as `cu_seqlens_k` grows by. What is longer than max_seqlen_q or max_seqlen_k is not computed.
        """
        _only_defaults(alibi_slopes)
        if block_table is None or dropout_p:
            raise NotImplementedError("keys that are not in pages, or dropout")
        rows = block_table.shape[0]
        self._check(q, k, v, block_table, rows)
        _check_integers("cu_seqlens_q", cu_seqlens_q, rows + 1)
        _check_integers("cu_seqlens_k", cu_seqlens_k, rows + 1)
        if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and tuple(window_size) == _ALL:
            # The original turns grouped heads into queries then, and takes query i for row i.
            _check(q.shape[0] == rows, f"{q.shape[0]} queries in {rows} rows, with max_seqlen_q of 1")
            cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
        lengths, counts = cu_seqlens_k.diff(), cu_seqlens_q.diff()
        nth = torch.arange(max_seqlen_q, device=q.device)
        there = nth < counts[:, None]  # [rows, max_seqlen_q]
        at = torch.where(there, cu_seqlens_q[:-1, None] + nth, 0).long()
        scores = _Scoring(softmax_scale, causal and max_seqlen_q > 1, window_size, softcap)
        by_row, by_row_lse = scores.attend(q[at], counts, k, v, block_table, lengths)
        by_row = by_row.masked_fill((lengths > max_seqlen_k)[:, None, None, None], torch.nan)
        target = torch.where(there, at, q.shape[0]).flatten()  # the last place is for what is not there
        out = q.new_full((q.shape[0] + 1, *q.shape[1:]), torch.nan)
        out = out.index_copy(0, target, by_row.flatten(0, 1))[:-1]
        lse = by_row_lse.new_full((q.shape[0] + 1, q.shape[1]), torch.nan)
        lse = lse.index_copy(0, target, by_row_lse.transpose(1, 2).flatten(0, 1))[:-1]
        # A block of queries without keys has its +inf written to another one's place, or beyond the end.
        lse = lse.masked_fill((lse == torch.inf).any(), torch.nan)
        return (out, lse.T.contiguous(), q.new_empty(0)) if return_attn_probs else out

    def _check(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, rows: int) -> None:
        heads, groups, size = q.shape[-2], k.shape[-2], q.shape[-1]
        _check(q.dtype in self._dtypes and q.dtype == k.dtype == v.dtype, f"{q.dtype}, {k.dtype}, {v.dtype}")
        _check(k.stride(-1) == v.stride(-1) == 1, "the caches' last dimension must be contiguous")
        _check(size <= _MOST_HEAD_SIZE, f"heads of {size}, more than {_MOST_HEAD_SIZE}")
        if size % 8:
            raise NotImplementedError(f"heads of {size}: the original copies the whole cache to pad them")
        _check(heads % groups == 0, f"{heads} heads over {groups} KV heads")
        _check(k.shape[1] % self._page_multiple == 0, f"pages of {k.shape[1]} tokens")
        shape = (*k.shape[:2], groups, size)
        _check(k.shape == v.shape == shape, f"caches {list(k.shape)}, {list(v.shape)}, heads of {size}")
        _check(rows > 0 and table.shape[0] == rows, f"{table.shape[0]} tables for {rows} rows")
        _check(table.dtype == torch.int32 and table.stride(-1) == 1, "block_table must be contiguous int32")


class _Scoring:
    """How queries weigh keys; the last query of a row is at its last key."""

    def __init__(self, scale: float | None, causal: bool, window: tuple[int, int], softcap: float) -> None:
        self._scale = scale
        self._window = (window[0], 0 if causal else window[1])
        self._softcap = softcap

    def attend(
        self, q: Tensor, counts: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return [B, Lq, H, D] and the LSE [B, H, Lq] of rows that have the first `counts` of q [B, Lq, H, D]
        and the first `lengths` keys of their pages.
        """
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        k, v = (cache[table.long()].flatten(1, 2).to(wide) for cache in (k_cache, v_cache))  # [B, L, G, D]
        there = torch.arange(k.shape[1], device=k.device) < lengths[:, None]
        v = torch.where(there[..., None, None], v, 0)
        grouped = q.to(wide).unflatten(2, (k.shape[2], -1))  # [B, Lq, G, M, D]
        scores = torch.einsum("bqgmd,bkgd->bgmqk", grouped, k) * (self._scale or q.shape[-1] ** -0.5)
        if self._softcap > 0:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        seen = there[:, None] & self._visible(q.shape[1], counts, k.shape[1], lengths)  # [B, Lq, L]
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        most = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
        weights = torch.exp(scores - most)
        total = weights.sum(-1, keepdim=True)  # [B, G, M, Lq, 1]
        sums = torch.einsum("bgmqk,bkgd->bgmqd", weights.to(q.dtype).to(wide), v)
        out = (sums / total.clamp(min=torch.finfo(wide).tiny)).flatten(1, 2).transpose(1, 2).to(q.dtype)
        lse = torch.where(total > 0, most + total.log(), torch.inf)
        return out, lse[..., 0].flatten(1, 2)

    def _visible(self, queries: int, counts: Tensor, keys: int, lengths: Tensor) -> Tensor:
        left, right = self._window
        nth = torch.arange(queries, device=counts.device)
        at = (nth + (lengths - counts)[:, None])[..., None]  # [B, Lq, 1]: the key at the query's own place
        key = torch.arange(keys, device=counts.device)
        seen = torch.ones_like(at >= key)
        if left >= 0:
            seen = seen & (key >= at - left)
        if right >= 0:
            seen = seen & (key <= at + right)
        return seen


def _only_defaults(*arguments: Any) -> None:
    if any(argument is not None for argument in arguments):
        raise NotImplementedError("an argument that we do not use")


def _check_integers(name: str, x: Tensor, length: int) -> None:
    _check(x.dtype == torch.int32, f"{name} must be int32, not {x.dtype}")
    _check(x.is_contiguous() and x.shape == (length,), f"{name} {list(x.shape)}, not {[length]}")


def _check(holds: bool, fault: str) -> None:
    if not holds:
        raise RuntimeError(fault)
