"""Log probabilities under the model's own logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.engine.types import TokenLogprobs


def logprobs(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log probability of each chosen token [R], and ids and log probabilities of the `most` likely
    ones [R, most], of logits [R, V].
    """
    exact = logits.double()
    total = exact.logsumexp(dim=-1)
    top = exact.topk(most, dim=-1)
    return exact.gather(1, chosen[:, None])[:, 0] - total, top.indices, top.values - total[:, None]


def of_tokens(logits: Tensor, chosen: Sequence[int], most: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log probabilities of a chosen token and of so many likely ones for each of logits [R, V]."""
    ids = torch.tensor(list(chosen), device=logits.device)
    found = [tensor.tolist() for tensor in logprobs(logits, ids, max(most))]
    return [
        TokenLogprobs(token_id, own, tuple(zip(top[:count], values[:count], strict=True)))
        for token_id, own, top, values, count in zip(chosen, *found, most, strict=True)
    ]
