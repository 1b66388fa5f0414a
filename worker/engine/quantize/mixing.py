"""What a mixture's experts make of their tokens, by what they say of themselves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Expert = Callable[[int, Tensor], Tensor]
"""What an expert, by number, makes of rows [rows, hidden]."""


def parameters(module: Any) -> tuple[str, str]:
    """Return the names of what goes into experts, and what comes out of them."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def between(module: Any, x: Tensor) -> Tensor:
    """Return what goes into an expert's second product, of what its first has made."""
    made: Tensor = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    return made


def rows_of(index: Tensor, count: int) -> list[Tensor]:
    """Return, by expert, where in index [tokens, chosen], flattened, it has been chosen."""
    chosen = index.flatten()
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=count)[:count].tolist()
    return list(order[: sum(counts)].split(counts))


def mix(module: Any, expert: Expert, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum [tokens, hidden] of what each token's experts make of it."""
    mixed = torch.zeros_like(hidden)
    for number, places in enumerate(rows_of(index, module.num_experts)):
        if len(places):
            tokens = places // index.shape[-1]
            made = _normed(module, expert(number, hidden[tokens])) * weights.flatten()[places, None]
            mixed.index_add_(0, tokens, made.to(mixed.dtype))
    return mixed


def mix_unseen(module: Any, expert: Expert, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the same where the host cannot know who is chosen: every expert runs over every token.

    That reads every weight once. Products with few rows take no longer than to read their weight.
    """
    shares = weights.new_zeros(len(hidden), module.num_experts + 1)
    shares.scatter_add_(1, index.clamp(max=module.num_experts), weights)
    mixed = torch.zeros_like(hidden)
    for number in range(module.num_experts):
        share = shares[:, number, None]
        made = _normed(module, expert(number, hidden)) * share
        mixed += made.masked_fill(share == 0, 0).to(mixed.dtype)  # what nobody wants may be infinite
    return mixed


def _normed(module: Any, made: Tensor) -> Tensor:
    return module.post_expert_norm(made) if getattr(module, "has_post_expert_norm", False) else made
