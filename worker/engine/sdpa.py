"""Attention with its log-sum-exp by torch's memory-efficient kernel for GPUs, which is not public: tried on
each kind of input before it is used, and replaced by plain products where it is not what it should be.

The kernel (from xformers) takes queries and keys of as many heads each, counts keys from the top left when it
is causal, wants rows of a mask 16 elements apart, and fills up its natural log-sum-exps to 32 queries.
"""

import functools
import logging
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.engine import device_errors

log = logging.getLogger(__name__)
_kernel = torch.ops.aten._scaled_dot_product_efficient_attention
_ALIGNED = 16
_SIZE_MULTIPLE = 8
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def serves(k: Tensor, v: Tensor) -> bool:
    """Tell whether the kernel takes such keys and values [B, G, L, D] and is right on this device. The first
    call for a kind of them tries it, and waits for the device.
    """
    sizes = (k.shape[-1], v.shape[-1])
    fits = k.dtype in _TOLERANCE and all(size % _SIZE_MULTIPLE == 0 for size in sizes)
    return fits and _is_right(k.device, k.dtype, *sizes)


def refusals() -> int:
    """Return how many kinds of input the kernel was wrong about in this process."""
    return len(_refused)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the attention [B, H, n, value size] of q [B, H, n, D], and its LSE [B, H, n] in float32.

    Called as torch's kernel for CPUs is: keys and values [B, G, L, D], of fewer heads only where B is 1; a
    mask [B, 1, n, L] to add; `causal` sees key i from query i on.
    """
    groups, heads = k.shape[1], q.shape[1]
    if groups != heads:  # the groups become the batch, so that the heads of one share its keys
        q = q[0].unflatten(0, (groups, -1))
        k, v = (side[0][:, None].expand(-1, q.shape[1], -1, -1) for side in (k, v))
    n, length = q.shape[2], k.shape[2]
    if attn_mask is not None:
        shape = (q.shape[0], q.shape[1], n, length)
        attn_mask = _aligned(attn_mask.to(q.dtype)).expand(shape)
    out, lse, *_ = _kernel(q, k, v, attn_mask, True, dropout, causal, scale=scale)
    lse = lse[:, :, :n]
    if groups != heads:
        return out.flatten(0, 1)[None], lse.flatten(0, 1)[None]
    return out, lse


def plain(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The twin of `attend`: the definition, in float32."""
    repeat = q.shape[1] // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(repeat, 1), v.float().repeat_interleave(repeat, 1)
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _aligned(mask: Tensor) -> Tensor:
    """Return a mask [..., L] whose rows lie apart as the kernel wants it."""
    length = mask.shape[-1]
    first = mask[:, :, :1]  # one row for all queries where they are the same
    mask = first if mask.stride(2) == 0 else mask
    return F.pad(mask, (0, -length % _ALIGNED))[..., :length]


_refused: set[tuple[torch.device, torch.dtype, int, int]] = set()


@functools.cache
def _is_right(device: torch.device, dtype: torch.dtype, size: int, value_size: int) -> bool:
    try:
        gap = max(_gap(*case) for case in _cases(device, dtype, size, value_size))
        reason = "" if gap <= _TOLERANCE[dtype] else f"off by {gap:.2g}"
    except Exception as error:  # a private function may change in any way
        if device_errors.is_out_of_memory(error) or device_errors.is_lost(error):
            raise
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
    if reason:
        _refused.add((device, dtype, size, value_size))
        extra = {"dtype": dtype, "head_size": size, "device": device, "reason": reason}
        log.warning("plain products for attention", extra=extra)
    return not reason


Case = tuple[Tensor, Tensor, Tensor, bool, Tensor | None]


def _cases(device: torch.device, dtype: torch.dtype, size: int, value_size: int) -> list[Case]:
    """Return small inputs of each kind: rows with a mask, heads that share keys, and a prompt."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    length = 37
    unseen = torch.arange(length) >= torch.tensor([length, 1, 20])[:, None]
    mask = torch.zeros(3, length).masked_fill_(unseen, -torch.inf).to(device)
    rows = mask[:, None, None, :].expand(-1, 1, 4, -1)
    # Keys lie in storages that are longer than they are, as those of requests.
    keys, values = (
        normal(3, 2, 64, size)[:, :, 5 : 5 + length],
        normal(3, 2, 64, value_size)[:, :, 5 : 5 + length],
    )
    return [
        (normal(3, 2, 4, size), keys, values, False, rows),
        (normal(1, 2, 33, size), keys[:1], values[:1], False, None),
        (normal(1, 6, length, size), keys[:1], values[:1], True, None),
    ]


def _gap(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> float:
    """Return how far the kernel is from its twin at most; infinity where it gives no number."""
    scale = 1 / math.sqrt(q.shape[-1])
    found = attend(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    wanted = plain(q, k, v, causal, mask, scale)
    gaps = [float((a.float() - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
    return max(math.inf if math.isnan(gap) else gap for gap in gaps)
