"""Attention over pages by flash-attn (Dao 2023): to what a token has to itself, and to what several share.

Only tensors decide what is computed, so that a CUDA graph can record it.
"""

import importlib
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.engine import kv, pages
from worker.engine.attention import Rotation, Scoring
from worker.engine.paged_step import Own, PagedStep, Rows, Shared

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

    def __call__(
        self,
        step: PagedStep,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scoring: Scoring,
        rotation: Rotation | None = None,
        /,
    ) -> Tensor:
        if rotation is not None:
            queries, keys = rotation.apply(queries, keys)
        cache = step.pool.keys[layer], step.pool.values[layer]
        for target, new in zip(cache, (keys, values), strict=True):
            target.flatten(0, 1).index_copy_(0, step.slots, new)
        own = step.own if scoring.window is None else step.whole
        out, lse = self._own(own, queries.contiguous(), cache, scoring)
        if step.shared is None or scoring.window is not None:
            return out
        return _merged(out, lse, step.shared, *self._shared(step.shared, queries, cache, scoring))

    def _own(
        self, own: Own, queries: Tensor, cache: tuple[Tensor, Tensor], scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """Return attention [T, H, D] and its LSE [T, H]."""
        options = _options(scoring) | {"causal": True}
        if scoring.window is not None:
            options["window_size"] = (scoring.window - 1, 0)
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
            results.append(self._varlen(queries[own.decodes :], cache, own.prefill, 1, options))
        if len(results) == 1:
            return results[0]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

    def _shared(
        self, shared: Shared, queries: Tensor, cache: tuple[Tensor, Tensor], scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """Return the same of the shared rows' queries [N, H, D], [N, H]. The heads of a group are queries of
        its KV head, which is then read once for all of them: no query is hidden a key here.
        """
        groups = cache[0].shape[2]
        folded = queries[shared.queries].unflatten(1, (groups, -1)).transpose(1, 2)  # [N, M, G, D]
        n, heads = folded.shape[:2]
        out, lse = self._varlen(folded.flatten(0, 1), cache, shared.rows, heads, _options(scoring))
        out, lse = (x.unflatten(0, (n, heads)).transpose(1, 2).flatten(1, 2) for x in (out, lse))
        return out, lse

    def _varlen(
        self,
        queries: Tensor,
        cache: tuple[Tensor, Tensor],
        rows: Rows,
        times: int,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return attention and LSE of queries of which each of the rows has so many times as it says."""
        # Not kept from layer to layer: a graph that is recorded must compute it again.
        starts = rows.starts if times == 1 else rows.starts * times
        out, lse, _ = self._functions.flash_attn_varlen_func(
            queries.contiguous(),
            *cache,
            starts,
            rows.ends,
            rows.most_queries * times,
            rows.most_keys,
            block_table=rows.tables,
            return_attn_probs=True,
            **options,
        )
        return out, lse.transpose(0, 1)


def _options(scoring: Scoring) -> dict[str, Any]:
    return {"softmax_scale": scoring.scale, "softcap": scoring.softcap or 0.0}


def _merged(out: Tensor, lse: Tensor, shared: Shared, more: Tensor, more_lse: Tensor) -> Tensor:
    """Merge shared results [N, H, D] and their LSE [N, H] into the own ones [T, H, D], [T, H]."""
    there = shared.places >= 0
    at = shared.places.clamp(min=0)
    # A row without keys has an LSE of +inf, and what no row has is not even a number.
    weighs = there[..., None] & (more_lse[at] < torch.inf)  # [T, L, H]
    lses = torch.cat([lse[:, None], torch.where(weighs, more_lse[at], -torch.inf)], 1)
    outs = torch.cat([out[:, None], torch.where(weighs[..., None], more[at], 0)], 1)
    weights = lses.softmax(1)[..., None]
    return (weights * outs.to(lses.dtype)).sum(1).to(out.dtype)


def load() -> Functions:
    """Import flash-attn; raises ImportError."""
    module: Functions = importlib.import_module("flash_attn")
    return module


def why_not(layout: kv.Layout, scorings: list[Scoring]) -> str | None:
    """Return why flash-attn cannot serve a model's layers on its device, or None."""
    if layout.device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {layout.device}"
    if torch.cuda.get_device_capability(layout.device) < (8, 0):
        return "flash-attn needs compute capability 8.0"
    if layout.dtype not in _DTYPES:
        return f"flash-attn computes in float16 or bfloat16, not {layout.dtype}"
    reason = shape_fault(layout, scorings)
    if reason is None:
        try:
            load()
        except Exception as error:  # a build for another torch fails in any way
            return f"flash-attn cannot be imported: {error}".split("\n")[0]
    return reason


def shape_fault(layout: kv.Layout, scorings: list[Scoring]) -> str | None:
    """Return what of a model's attention flash-attn does not have, or None."""
    for _, key, value in layout.layers:
        if key != value:
            return f"keys of {key} and values of {value}"
        if key > _MOST_HEAD_SIZE or key % 8:
            return f"heads of {key}: at most {_MOST_HEAD_SIZE}, in steps of 8"
    return "attention sinks" if any(scoring.sinks is not None for scoring in scorings) else None
