"""Attention over the parts of a step: each run of keys once for all its queries, merged by log-sum-exp.

Splitting softmax attention over runs of keys and merging by log-sum-exp is exact (Milakov & Gimelshein 2018;
for shared prefixes: Hydragen, Juravsky et al. 2024, and the cascade attention of FlashInfer).
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.engine import precision, sdpa
from worker.engine.step import Part, Step

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class Scoring:
    """How a layer turns queries and keys into weights; `sinks` [H] are logits that take weight and give
    nothing.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Rotation:
    """What a layer leaves to the attention: a norm of single heads, and the rotary embedding.

    `cos` and `sin` [T, size / 2] turn elements i and i + size / 2 of queries and keys; `head_norm`
    [H + KV heads, size] are the weights of the norm before that, if there is one.
    """

    cos: Tensor
    sin: Tensor
    head_norm: Tensor | None = None
    epsilon: float = 0.0

    def apply(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [T, H, size] and keys [T, KV heads, size], normed and rotated."""
        heads = torch.cat([queries, keys], 1)
        if self.head_norm is not None:
            heads = F.rms_norm(heads, heads.shape[2:], eps=self.epsilon) * self.head_norm
        cos, sin = self.cos[:, None], self.sin[:, None]
        a, b = heads.chunk(2, -1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return rotated[:, : queries.shape[1]], rotated[:, queries.shape[1] :]


@dataclass(frozen=True)
class Heads:
    """What a layer hands to the attention: of each token of a step its queries [T, H, size], keys
    [T, KV heads, size] and values [T, KV heads, value size], and what is to be done with them.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scoring: Scoring
    rotation: Rotation | None = None

    def rotated(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys, normed and rotated if the layer has left that to be done."""
        if self.rotation is None:
            return self.queries, self.keys
        return self.rotation.apply(self.queries, self.keys)


class Backend(Protocol):
    """Writes a layer's keys and values where the step says, and returns the attention [T, H, value size] of
    its queries. May change what it is given.
    """

    def __call__(self, step: Step, heads: Heads, /) -> Tensor: ...


def _write(step: Step, heads: Heads) -> Tensor:
    """Write keys and values; return the queries."""
    queries, keys = heads.rotated()
    for write in step.writes:
        write.put(heads.layer, keys, heads.values)
    return queries


def dense(step: Step, heads: Heads, /) -> Tensor:
    """Attend part by part. Heads are grouped over KV heads (G groups of M) without repeating these."""
    queries, scoring = _write(step, heads), heads.scoring
    tokens, count, _ = queries.shape
    groups, size = heads.keys.shape[1], heads.values.shape[2]
    by_group = queries.unflatten(1, (groups, -1)).transpose(0, 1).contiguous()  # [G, T, M, D]
    merges = bool(step.shared) or scoring.sinks is not None
    wide = precision.wide(queries.dtype)
    out = queries.new_empty(tokens, groups, count // groups, size, dtype=wide if merges else None)
    lse = queries.new_empty(tokens, groups, count // groups, dtype=wide) if merges else None
    for part in chain.from_iterable(whole.pieces() for whole in step.own):
        result, result_lse = _attend(part, heads.layer, queries, by_group, scoring)
        out[part.tokens] = result
        if lse is not None:
            lse[part.tokens] = result_lse
    for part in step.shared:
        assert lse is not None
        more, more_lse = _attend(part, heads.layer, queries, by_group, scoring)
        _merge(out, lse, part, more, more_lse, keeps_lse=scoring.sinks is not None or not part.last)
    if scoring.sinks is not None and lse is not None:
        out *= torch.sigmoid(lse - scoring.sinks.view(groups, -1))[..., None].to(out.dtype)
    return out.flatten(1, 2).to(queries.dtype)


def _merge(out: Tensor, lse: Tensor, part: Part, more: Tensor, more_lse: Tensor, keeps_lse: bool) -> None:
    """Merge attention over more keys, `more` [n, G, M, D] and its LSE [n, G, M], into that of a part's
    tokens.
    """
    tokens = part.tokens
    old_out, old_lse = out[tokens], lse[tokens]  # views where `tokens` is a slice
    weight = torch.sigmoid(more_lse - old_lse)[..., None].to(out.dtype)
    old_out.lerp_(more.to(out.dtype), weight)
    if keeps_lse:
        torch.logaddexp(old_lse, more_lse, out=old_lse)
    if not isinstance(tokens, slice):
        out[tokens] = old_out
        if keeps_lse:
            lse[tokens] = old_lse


def _attend(
    part: Part, layer: int, queries: Tensor, by_group: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return the attention of a part's queries over its keys alone [n, G, M, value size], and the LSE [n, G,
    M].
    """
    k, v = part.keys_values(layer)  # [B, G, L, D]
    window = scoring.window if scoring.window is not None and scoring.window < part.reach else None
    kernel = None if scoring.softcap is not None or window is not None else _kernel(k, v)
    if kernel is None:
        q = queries[part.tokens].unflatten(1, (k.shape[1], -1))
        return _attend_plain(part, q, k, v, part.mask(window, precision.wide(q.dtype)), scoring)
    if part.triangular:
        q = queries[part.tokens].transpose(0, 1)[None]  # [1, H, n, D]
        out, lse = kernel(q, k, v, 0.0, True, scale=scoring.scale)
        shape = (k.shape[1], -1)
        return out[0].transpose(0, 1).unflatten(1, shape), lse[0].transpose(0, 1).unflatten(1, shape)
    q = by_group[:, part.tokens]  # [G, n, M, D]
    if part.batched:  # the heads of a group are the queries of its KV head
        mask = part.mask(None, precision.wide(q.dtype))
        mask = None if mask is None else mask[:, None, None, :].expand(-1, 1, q.shape[2], -1)
        return kernel(q.transpose(0, 1), k, v, 0.0, False, attn_mask=mask, scale=scoring.scale)
    out, lse = kernel(q.flatten(1, 2)[None], k, v, 0.0, False, scale=scoring.scale)
    shape = (q.shape[1], q.shape[2])
    return out[0].unflatten(1, shape).transpose(0, 1), lse[0].unflatten(1, shape).transpose(0, 1)


def _kernel(k: Tensor, v: Tensor) -> Any:
    """Return torch's own attention for such keys and values, None if there is none."""
    if k.device.type == "cpu":
        return _flash if k.shape[-1] == v.shape[-1] else None
    return sdpa.attend if sdpa.serves(k, v) else None


def _attend_plain(
    part: Part, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """The same from matrix products of q [n, G, M, D]. Queries that see no key get 0 and LSE -inf."""
    n, groups, heads, _ = q.shape
    if not part.batched:
        q = q.permute(1, 2, 0, 3).reshape(1, groups, heads * n, -1)
    scores = (q @ k.mT).to(precision.wide(q.dtype)) * scoring.scale  # [B, G, queries of the row, L]
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None and part.batched:
        scores = scores + mask[:, None, None, :]
    elif mask is not None:
        scores = (scores.view(groups, heads, n, -1) + mask).view(scores.shape)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])
    out = weights.to(v.dtype) @ v
    if part.batched:
        return out, lse
    out = out.view(groups, heads, n, -1).permute(2, 0, 1, 3)
    return out, lse.view(groups, heads, n).permute(2, 0, 1)


def reference(step: Step, heads: Heads, /) -> Tensor:
    """The oracle: token by token, all keys it sees side by side, one softmax, in float64."""
    queries, scoring = _write(step, heads), heads.scoring
    results = []
    for token in range(queries.shape[0]):
        runs = [seen(part, heads.layer, token, scoring.window) for part in _parts(step)]
        k, v = (torch.cat(side).double() for side in zip(*runs, strict=True))  # [L, G, D]
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


def seen(part: Part, layer: int, token: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the keys and values [n, G, D] of a part that one packed token sees."""
    tokens = part.tokens
    indices = list(range(tokens.start, tokens.stop)) if isinstance(tokens, slice) else tokens.tolist()
    if token not in indices:
        k, v = part.sources[0].keys_values(layer)
        return k[0, :, :0].transpose(0, 1), v[0, :, :0].transpose(0, 1)
    query = indices.index(token)
    k, v = part.sources[query if part.batched else 0].keys_values(layer)
    seen = part.visible(window)
    which = part.first + (torch.arange(part.length) if seen is None else seen[query].nonzero()[:, 0])
    return k[0][:, which].transpose(0, 1), v[0][:, which].transpose(0, 1)


BACKENDS: dict[str, Backend] = {"dense": dense, "reference": reference}
