"""Attention of whole sequences that lie side by side, each to itself: nothing is kept, nothing is shared."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.engine.attention import Heads, Scoring
from worker.engine.step import Step

# Sequences are padded to one another, inside the attention alone, while that adds at most a quarter.
_MOST_PADDING = 1.25
# Of scores that are held at once, where a layer's scoring is none that torch has a fused operation for.
_MOST_SCORES = 1 << 24


@dataclass(frozen=True)
class _Group:
    """Sequences of like lengths: where their tokens lie [B, S], and which places have one."""

    places: Tensor
    real: Tensor


class WholeAttention:
    """An attention.Backend for steps whose own parts are whole sequences."""

    def __init__(self) -> None:
        self._current: tuple[Step, list[_Group]] | None = None

    def __call__(self, step: Step, heads: Heads, /) -> Tensor:
        """See attention.Backend."""
        queries, keys = heads.rotated()
        out = queries.new_empty(*queries.shape[:2], heads.values.shape[2])
        for group in self._groups(step):
            q, k, v = (x[group.places].transpose(1, 2) for x in (queries, keys, heads.values))  # [B, H, S, D]
            out[group.places[group.real]] = _attend(q, k, v, heads.scoring).transpose(1, 2)[group.real]
        return out

    def _groups(self, step: Step) -> list[_Group]:
        if self._current is None or self._current[0] is not step:
            spans = [part.tokens for part in step.own if isinstance(part.tokens, slice)]
            self._current = step, [_group(each, step.ids.device) for each in _alike(spans)]
        return self._current[1]


def _alike(spans: list[slice]) -> list[list[slice]]:
    """Return sequences in groups that are little padded."""
    groups: list[list[slice]] = []
    tokens = 0
    for span in sorted(spans, key=_length):
        tokens += _length(span)
        if groups and (len(groups[-1]) + 1) * _length(span) <= _MOST_PADDING * tokens:
            groups[-1].append(span)
        else:
            groups.append([span])
            tokens = _length(span)
    return groups


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _group(spans: list[slice], device: torch.device) -> _Group:
    starts = torch.tensor([span.start for span in spans], device=device)
    lengths = torch.tensor([_length(span) for span in spans], device=device)
    offsets = torch.arange(max(map(_length, spans)), device=device)
    real = offsets < lengths[:, None]
    # A place behind a sequence has its first token once more, which no token before it sees.
    return _Group(starts[:, None] + offsets * real, real)


def _attend(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Return the causal attention [B, H, S, value size] of q [B, H, S, D], k and v [B, KV heads, S, ...]."""
    windowed = scoring.window is not None and scoring.window < q.shape[2]
    if not windowed and scoring.softcap is None and scoring.sinks is None:
        options: dict[str, Any] = {"scale": scoring.scale, "enable_gqa": q.shape[1] != k.shape[1]}
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    count = q.shape[2]
    rows = max(1, _MOST_SCORES // (q.shape[0] * q.shape[1] * count))
    blocks = [_block(q, k, v, first, min(first + rows, count), scoring) for first in range(0, count, rows)]
    return torch.cat(blocks, 2)


def _block(q: Tensor, k: Tensor, v: Tensor, first: int, end: int, scoring: Scoring) -> Tensor:
    """Return the attention of the queries from `first` to before `end`."""
    window = scoring.window or end
    begin = max(0, first - window + 1)
    queries = torch.arange(first, end, device=q.device)[:, None]
    keys = torch.arange(begin, end, device=q.device)
    unseen = (keys > queries) | (keys <= queries - window)
    scores = q[:, :, first:end] @ k[:, :, begin:end].mT
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(unseen, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : end - begin]
    return weights.to(v.dtype) @ v[:, :, begin:end]
