"""Attention over the parts of a step: each run of keys once for all its queries, merged by log-sum-exp.

Splitting softmax attention over runs of keys and merging by log-sum-exp is exact (Milakov & Gimelshein 2018; for
shared prefixes: Hydragen, Juravsky et al. 2024, and the cascade attention of FlashInfer).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.engine.step import Part, Step

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Scoring:
    """How a layer turns queries and keys into weights; `sinks` [H] are logits that take weight and give nothing."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Backend(Protocol):
    """Computes attention [T, H, value size] of a step's packed queries [T, H, key size]."""

    def __call__(self, step: Step, layer: int, queries: Tensor, scoring: Scoring) -> Tensor: ...


def dense(step: Step, layer: int, queries: Tensor, scoring: Scoring) -> Tensor:
    """Attend part by part. Heads are grouped over KV heads without repeating these."""
    first = step.own[0]
    out, lse = _attend(first, layer, queries, scoring)
    if len(step.own) > 1:
        out, lse = _gather(step, layer, queries, scoring, out, lse)
    for part in step.shared:
        _merge(out, lse, part.tokens, *_attend(part, layer, queries, scoring))
    if scoring.sinks is not None:
        out *= torch.sigmoid(lse - scoring.sinks)[..., None].to(out.dtype)
    return out


def _gather(
    step: Step, layer: int, queries: Tensor, scoring: Scoring, first_out: Tensor, first_lse: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, heads = queries.shape[:2]
    out = first_out.new_empty(tokens, heads, first_out.shape[-1])
    lse = first_lse.new_empty(tokens, heads)
    out[step.own[0].tokens], lse[step.own[0].tokens] = first_out, first_lse
    for part in step.own[1:]:
        out[part.tokens], lse[part.tokens] = _attend(part, layer, queries, scoring)
    return out, lse


def _merge(out: Tensor, lse: Tensor, tokens: slice | Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge attention over more keys, `more` [n, H, D] and its LSE [n, H], into that of some tokens, in place."""
    old_out, old_lse = out[tokens], lse[tokens]  # views where `tokens` is a slice
    weight = torch.sigmoid(more_lse - old_lse)[..., None].to(out.dtype)
    if isinstance(tokens, slice):
        old_out.lerp_(more, weight)
        torch.logaddexp(old_lse, more_lse, out=old_lse)
    else:
        out[tokens] = torch.lerp(old_out, more, weight)
        lse[tokens] = torch.logaddexp(old_lse, more_lse)


def _attend(part: Part, layer: int, queries: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return the attention of a part's queries over its keys alone [n, H, value size] and the LSE [n, H]."""
    q = queries[part.tokens]  # [n, H, D]
    k, v = part.keys_values(layer)  # [B, G, L, D]
    groups = k.shape[1]
    window = scoring.window if scoring.window is not None and scoring.window < part.reach else None
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    plain = scoring.softcap is not None or k.shape[-1] != v.shape[-1] or q.device.type != "cpu"
    if plain or window is not None:
        return _attend_plain(part, q, k, v, part.mask(window, wide), scoring)
    mask = None if part.triangular else part.mask(None, wide)
    if part.batched:  # the heads of a group are the queries of its KV head
        q = q.view(q.shape[0], groups, -1, q.shape[-1])
        mask = None if mask is None else mask[:, None, None, :].expand(-1, 1, q.shape[2], -1)
        out, lse = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=scoring.scale)
        return out.reshape(q.shape[0], -1, v.shape[-1]), lse.reshape(q.shape[0], -1)
    mask = None if mask is None else mask[None, None]
    q = q.transpose(0, 1)[None]
    out, lse = _flash(q, k, v, 0.0, part.triangular, attn_mask=mask, scale=scoring.scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _attend_plain(
    part: Part, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """The same from matrix products, for what the fused kernel does not do. Rows without keys: 0 and LSE -inf."""
    n, heads, size = q.shape
    groups = k.shape[1]
    if part.batched:
        q = q.view(n, groups, heads // groups, size)  # [B, G, M, D]
    else:
        q = q.view(n, groups, heads // groups, size).permute(1, 2, 0, 3).reshape(1, groups, -1, size)
    scores = (q @ k.mT).to(torch.float64 if q.dtype == torch.float64 else torch.float32) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None and part.batched:
        scores = scores + mask[:, None, None, :]
    elif mask is not None:
        scores = (scores.view(groups, heads // groups, n, -1) + mask).view(scores.shape)
    lse = scores.logsumexp(-1)  # [B, G, M]
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])
    out = weights.to(v.dtype) @ v
    if part.batched:
        return out.reshape(n, heads, -1), lse.reshape(n, heads)
    out = out.view(groups, heads // groups, n, -1).permute(2, 0, 1, 3).reshape(n, heads, -1)
    return out, lse.view(groups, heads // groups, n).permute(2, 0, 1).reshape(n, heads)


def reference(step: Step, layer: int, queries: Tensor, scoring: Scoring) -> Tensor:
    """The oracle: token by token, all keys it sees side by side, one softmax, in float64."""
    results = []
    for token in range(queries.shape[0]):
        keys, values = zip(*(_seen(part, layer, token, scoring.window) for part in _parts(step)), strict=True)
        k, v = torch.cat(keys).double(), torch.cat(values).double()  # [L, G, D]
        repeat = queries.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("hd,lhd->hl", queries[token].double(), k) * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks.double()[:, None]], -1)
        weights = scores.softmax(-1)[:, : k.shape[0]]
        results.append(torch.einsum("hl,lhd->hd", weights, v).to(queries.dtype))
    return torch.stack(results)


def _parts(step: Step) -> list[Part]:
    return step.own + step.shared


def _seen(part: Part, layer: int, token: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the keys and values [n, G, D] of a part that one packed token sees."""
    k, v = part.keys_values(layer)
    tokens = part.tokens
    indices = list(range(tokens.start, tokens.stop)) if isinstance(tokens, slice) else tokens.tolist()
    if token not in indices:
        return k[0, :, :0].transpose(0, 1), v[0, :, :0].transpose(0, 1)
    query = indices.index(token)
    row = query if part.batched else 0
    seen = part.visible(window)
    which = torch.arange(part.length) if seen is None else seen[query].nonzero()[:, 0]
    return k[row][:, which].transpose(0, 1), v[row][:, which].transpose(0, 1)


BACKENDS: dict[str, Backend] = {"dense": dense, "reference": reference}
