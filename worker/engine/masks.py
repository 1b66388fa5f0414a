"""Which tokens each layer sees: what transformers' mask says, against the window that our attention is told.

Some models pass a layer's window on to the attention, others have it in the mask alone, which ours does not
get. A trial with prompts shorter than the window could not tell, so the mask is asked for once, as its rule.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

_NAME = "longhaul_masks"
# No context is as long: a window that reaches farther is none.
_FAR = 1 << 20
_NO_WINDOW, _OTHER = 0, -1


@torch.inference_mode()
def check(model: Any) -> None:
    """Raise NotImplementedError when a layer sees other tokens than our attention would. Leaves the model set
    to an attention that computes nothing.
    """
    model.set_attn_implementation(_NAME)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    model(input_ids=ids, position_ids=torch.arange(2, device=model.device)[None], use_cache=False)


def _mask(
    mask_function: Callable[..., Tensor], q_length: int, kv_length: int, device: torch.device, **_: Any
) -> Tensor:
    """What transformers calls: a mask [1, 1, queries, keys] full of the window that its rule amounts to."""
    window = _window(mask_function, device)
    return torch.full((1, 1, q_length, kv_length), window, dtype=torch.int64, device=device)


def _window(rule: Callable[..., Tensor], device: torch.device) -> int:
    """Return how many tokens a rule lets one see, itself included, at the end of the longest context."""
    first = torch.zeros(1, 1, dtype=torch.long, device=device)
    keys = torch.arange(_FAR + 2, device=device)[None]
    counts = set()
    for query in (_FAR, _FAR + 1):  # chunks, too, look like windows to one token
        seen = rule(first, first, first + query, keys).expand(1, _FAR + 2)[0]
        count = int(seen.sum())
        if not bool(seen[query + 1 - count : query + 1].all()):
            return _OTHER
        counts.add(_NO_WINDOW if count == query + 1 else count)
    return counts.pop() if len(counts) == 1 else _OTHER


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    told = options.get("sliding_window") or _NO_WINDOW  # as our attention takes it
    meant = _of_mask(attention_mask)
    if meant != (told if told <= _FAR else _NO_WINDOW):
        layer = module.layer_idx
        raise NotImplementedError(
            f"layer {layer} has {_words(meant)} in its mask, and tells the attention of {_words(told)}"
        )
    repeated = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return repeated.transpose(1, 2).contiguous(), None


def _of_mask(mask: Any) -> int:
    """Return the window in a mask that a layer got; a model that makes masks without asking us has others."""
    if mask is None:
        return _NO_WINDOW
    if not isinstance(mask, Tensor) or mask.dtype != torch.int64:
        return _OTHER
    return int(mask.max())


def _words(window: int) -> str:
    names = {_NO_WINDOW: "no window", _OTHER: "a rule of its own"}
    return names.get(window, f"a window of {window}")


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)
