"""Log probabilities of chosen tokens and of the most probable ones, under the model's own logits."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.engine import sampling
from worker.engine.native import library
from worker.engine.native.library import Kernels
from worker.engine.types import TokenLogprobs

Found = tuple[Tensor, Tensor, Tensor]
_Logprobs = library.structure("Logprobs", "logits row rows size most chosen of_chosen top of_top")


def logprobs(logits: Tensor, chosen: Tensor, most: int) -> Found:
    """Return the natural log probability [R] of the tokens `chosen` [R] under logits [R, V], and the ids and
    log probabilities [R, most] of the most probable ones: higher ones first, and the lower id of equals.

    All in float64; `most` is at most V. A token whose logit is -inf has -inf; each row needs a finite
    logit, and no NaN or inf.
    """
    most = min(most, logits.shape[-1])
    logits, chosen = sampling.with_kernels(logits), chosen.to(logits.device, torch.long).contiguous()
    kernels = library.kernels(logits.dtype, logits.device)
    if kernels is None:
        return _by_operations(logits, chosen, most)
    return _natively(kernels, logits, chosen, most)


def of_tokens(logits: Tensor, chosen: Sequence[int], most: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log probabilities of a chosen token and of so many likely ones for each of logits [R, V]."""
    ids = torch.tensor(list(chosen), device=logits.device)
    found = [tensor.tolist() for tensor in logprobs(logits, ids, max(most))]
    return [
        TokenLogprobs(token_id, own, tuple(zip(top[:count], values[:count], strict=True)))
        for token_id, own, top, values, count in zip(chosen, *found, most, strict=True)
    ]


def _natively(kernels: Kernels, logits: Tensor, chosen: Tensor, most: int) -> Found:
    rows, size = logits.shape
    if chosen.shape != (rows,) or (rows and not 0 <= int(chosen.min()) <= int(chosen.max()) < size):
        raise IndexError(f"chosen tokens {chosen.tolist()} of logits {tuple(logits.shape)}")
    of_chosen = torch.empty(rows, dtype=torch.float64)
    top, of_top = torch.empty(rows, most, dtype=torch.long), torch.empty(rows, most, dtype=torch.float64)
    outputs = (tensor.data_ptr() for tensor in (chosen, of_chosen, top, of_top))
    task = _Logprobs(logits.data_ptr(), logits.stride(0), rows, size, most, *outputs)
    if rows:
        kernels.logprobs(ctypes.byref(task), torch.get_num_threads())
    return of_chosen, top, of_top


def _by_operations(logits: Tensor, chosen: Tensor, most: int) -> Found:
    of_all = logits.double().log_softmax(dim=-1)
    top = logits.topk(most, dim=-1).indices
    _order_equals(logits, top)
    return of_all.gather(1, chosen[:, None])[:, 0], top, of_all.gather(1, top)


def _order_equals(logits: Tensor, top: Tensor) -> None:
    """Put the rows of `top` [R, most] right where logits are equal, of which topk takes any."""
    if not top.numel():
        return
    values = logits.gather(1, top)
    open_ends = (logits >= values[:, -1:]).sum(dim=-1) > top.shape[1]
    rows = (open_ends | (values[:, 1:] == values[:, :-1]).any(dim=-1)).nonzero()[:, 0]
    if rows.numel():
        top[rows] = logits[rows].sort(dim=-1, descending=True, stable=True).indices[:, : top.shape[1]]
