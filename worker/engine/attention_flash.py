"""Attention over pages by flash-attn (Dao 2023): to what a token has to itself, and to what several share.

Only tensors decide what is computed, so that a CUDA graph can record it.
"""

import importlib
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.engine import kv, pages
from worker.engine.attention import Heads, Scoring
from worker.engine.paged_step import Own, PagedStep, Rows, Shared, Streamed

VERSION = "2.8.3"
"""Later ones read from the device where keys are in pages, which no graph can record."""
_MOST_HEAD_SIZE = 256
_DTYPES = (torch.float16, torch.bfloat16)


class Functions(Protocol):
    """What we call of `flash_attn`."""

    flash_attn_with_kvcache: Any
    flash_attn_varlen_func: Any


class FlashAttention:
    """A backend over pages, see attention.Backend. Writes keys and values, then attends to what is there."""

    def __init__(self, functions: Functions, page_tokens: int = pages.PAGE_TOKENS) -> None:
        self.page_tokens = page_tokens
        self._functions = functions

    def __call__(self, step: PagedStep, heads: Heads, /) -> Tensor:
        queries, keys = heads.rotated()
        layer, scoring = heads.layer, heads.scoring
        cache = step.pool.keys[layer], step.pool.values[layer]
        for target, new in zip(cache, (keys, heads.values), strict=True):
            target.flatten(0, 1).index_copy_(0, step.slots, new)
        options: dict[str, Any] = {"softmax_scale": scoring.scale, "softcap": scoring.softcap or 0.0}
        window = _hiding(scoring.window, step)
        if window is not None:
            options["window_size"] = (window - 1, 0)
            return self._own(step.whole, queries, cache, options)[0]
        out, lse = self._own(step.own, queries, cache, options)
        if step.streamed is not None:
            self._stream(step.streamed, layer, queries, cache, options, out, lse)
        if step.shared is None:
            return out
        return _merged(out, lse, step.shared, *self._shared(step.shared, queries, cache, options))

    def _own(
        self, own: Own, queries: Tensor, cache: tuple[Tensor, Tensor], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return attention [T, H, D] and its LSE [T, H]."""
        results = []
        if own.decode is not None:
            out, lse = self._functions.flash_attn_with_kvcache(
                queries[: own.decodes, None],
                *cache,
                cache_seqlens=own.decode.lengths,
                block_table=own.decode.tables,
                return_softmax_lse=True,
                **options,
            )
            results.append((out[:, 0], lse[:, :, 0]))
        if own.prefill is not None:
            rest = queries[own.decodes :]
            results.append(self._varlen(rest, cache, own.prefill, 1, options | {"causal": True}))
        if len(results) == 1:
            return results[0]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

    def _shared(
        self, shared: Shared, queries: Tensor, cache: tuple[Tensor, Tensor], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the same of the shared rows' queries, [N, G, M, D] and [N, G, M]."""
        return self._folded(queries[shared.queries], cache, shared.rows, options)

    def _stream(
        self,
        streamed: Streamed,
        layer: int,
        queries: Tensor,
        cache: tuple[Tensor, Tensor],
        options: dict[str, Any],
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Merge what is in host memory into attention [T, H, D] of its tokens, whose other keys have the LSE
        [T, H]. A piece comes while the one before is attended to.
        """
        tokens = slice(streamed.first, streamed.last)
        groups = cache[0].shape[2]
        total = lse[tokens].unflatten(1, (groups, -1))  # [N, G, M]
        merged = out[tokens].unflatten(1, (groups, -1)).to(total.dtype)  # [N, G, M, D]
        arrived = streamed.pieces[0].bring(layer)
        for piece, after in zip(streamed.pieces, [*streamed.pieces[1:], None], strict=True):
            coming = after.bring(layer) if after is not None else arrived
            arrived()
            more, more_lse = self._folded(queries[tokens], cache, piece.rows, options)
            both = torch.logaddexp(total, more_lse)
            merged = merged * (total - both).exp()[..., None] + more * (more_lse - both).exp()[..., None]
            total, arrived = both, coming
        out[tokens] = merged.flatten(1, 2).to(out.dtype)

    def _folded(
        self, queries: Tensor, cache: tuple[Tensor, Tensor], rows: Rows, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return attention [N, G, M, D] and LSE [N, G, M] of rows of queries [N, H, D].

        The M heads of a group are queries of its KV head, which is then read once for all of them: no query
        is hidden a key here.
        """
        groups = cache[0].shape[2]
        folded = queries.unflatten(1, (groups, -1)).transpose(1, 2)  # [N, M, G, D]
        n, heads = folded.shape[:2]
        out, lse = self._varlen(folded.flatten(0, 1), cache, rows, heads, options)
        return out.unflatten(0, (n, heads)).transpose(1, 2), lse.unflatten(0, (n, heads)).transpose(1, 2)

    def _varlen(
        self,
        queries: Tensor,
        cache: tuple[Tensor, Tensor],
        rows: Rows,
        times: int,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return attention and LSE of queries of which each of the rows has so many times as it says."""
        most = rows.most_queries * times
        if queries.shape[0] != rows.lengths.shape[0]:
            most = max(most, 2)  # 1 says that each row has one, none less
        out, lse, _ = self._functions.flash_attn_varlen_func(
            queries,
            *cache,
            # Not kept from layer to layer: a graph that is recorded must compute it again.
            rows.starts if times == 1 else rows.starts * times,
            rows.ends,
            most,
            rows.most_keys,
            block_table=rows.tables,
            return_attn_probs=True,
            **options,
        )
        return out, lse.T


def _hiding(window: int | None, step: PagedStep) -> int | None:
    """Return a window if it may hide a key that is there. Without one flash-attn reads a KV head once for its
    whole group, and we what is shared once for all.
    """
    whole, streamed = step.whole, step.streamed
    most = max(rows.most_keys for rows in (whole.decode, whole.prefill) if rows is not None)
    most += streamed.keys if streamed is not None else 0
    return window if window is not None and window < most else None


def _merged(out: Tensor, lse: Tensor, shared: Shared, more: Tensor, more_lse: Tensor) -> Tensor:
    """Merge shared results [N, G, M, D] and their LSE [N, G, M] into the own ones [T, H, D], [T, H]."""
    groups = more.shape[1:3]
    there = (shared.places >= 0)[..., None, None]  # [T, L, 1, 1]
    at = shared.places.clamp(min=0)
    # Without keys flash-attn gives an LSE of +inf.
    own_lse = lse.masked_fill(lse == torch.inf, -torch.inf).unflatten(1, groups)[:, None]
    lses = torch.cat([own_lse, torch.where(there, more_lse[at], -torch.inf)], 1)  # [T, 1 + L, G, M]
    weights = lses.softmax(1)[..., None]
    merged = weights[:, 0] * out.unflatten(1, groups)
    for nth in range(at.shape[1]):  # one after the other: all at once would be as many times the memory
        # What is in no row is not even a number: no weight makes it nothing.
        merged.addcmul_(weights[:, nth + 1], torch.where(there[:, nth, ..., None], more[at[:, nth]], 0))
    return merged.flatten(1, 2).to(out.dtype)


class Unavailable(Exception):
    """Why flash-attn does not attend where it was asked for."""


def load() -> Functions:
    """Import flash-attn; raises Unavailable."""
    try:
        module = importlib.import_module("flash_attn")
    except Exception as error:  # a build for another torch fails in any way
        raise Unavailable(f"flash-attn cannot be imported: {error}".split("\n")[0]) from error
    if not module.__version__.startswith(VERSION):
        raise Unavailable(f"flash-attn {module.__version__} is installed, not {VERSION}")
    return module


def why_not(layout: kv.Layout, scorings: list[Scoring]) -> str | None:
    """Return why flash-attn cannot serve a model's layers on its device, or None."""
    fault = shape_fault(layout, scorings)
    if fault is not None:
        return f"flash-attn does not have {fault}"
    if layout.device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {layout.device}"
    if layout.dtype not in _DTYPES:
        return f"flash-attn computes in float16 or bfloat16, not {layout.dtype}"
    if torch.cuda.get_device_capability(layout.device) < (8, 0):
        return "flash-attn needs compute capability 8.0"
    try:
        load()
    except Unavailable as reason:
        return str(reason)
    return None


def shape_fault(layout: kv.Layout, scorings: list[Scoring]) -> str | None:
    """Return what of a model's attention flash-attn does not have, or None."""
    for _, key, value in layout.layers:
        if key != value:
            return f"keys of {key} and values of {value}"
        if key > _MOST_HEAD_SIZE or key % 8:
            return f"heads of {key}: at most {_MOST_HEAD_SIZE}, in steps of 8"
    return "attention sinks" if any(scoring.sinks is not None for scoring in scorings) else None
