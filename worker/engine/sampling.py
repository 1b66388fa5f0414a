"""How a token is drawn: by (seed, position) alone, so that neither batch mates nor a rerun change it.

Two ways: the compiled kernels on a CPU, and torch's operations, their twin. Both compute in float64 whatever
the logits are. They draw the same token unless the draw is within 1e-9 of a step of the distribution, or what
top_p or min_p keeps is that close to one token more or less (from a temperature of 0.01 on; below, the
rounding of logit / temperature grows).
"""

import ctypes
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from worker.engine import seeds
from worker.engine.native import library
from worker.engine.native.library import Kernels
from worker.engine.types import Sampling

FIRST_CANDIDATES = 1024
_Draw = library.structure("Draw", "logits row rows size temperature top_p top_k min_p uniforms out")


@dataclass(frozen=True)
class Parameters:
    """The sampling parameters of R rows as columns [R, 1]."""

    seeds: list[int]
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, samplings: list[Sampling], device: torch.device | str) -> Self:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

        return cls(
            [sampling.seed for sampling in samplings],
            column([sampling.temperature for sampling in samplings]),
            column([sampling.top_p for sampling in samplings]),
            column([sampling.top_k for sampling in samplings]).long(),
            column([sampling.min_p for sampling in samplings]),
        )


def draw(logits: Tensor, parameters: Parameters, positions: list[int]) -> Tensor:
    """Draw one token per row from logits [R, V] for its position in the output; returns [R].

    The draw inverts the distribution function over the vocabulary in its own order (not by rank), in float64:
    a tiny change of the logits moves its steps a tiny bit, and another token is drawn only that close to one.
    A logit of -inf is never drawn; each row needs a finite one, and none that is NaN or inf.
    """
    numbers = [seeds.uniform(*draws) for draws in zip(parameters.seeds, positions, strict=True)]
    uniforms = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    logits = with_kernels(logits)
    kernels = library.kernels(logits.dtype, logits.device)
    if kernels is None:
        return drawn(filtered(logits, parameters), uniforms)
    return _drawn_natively(kernels, logits, parameters, uniforms)


def with_kernels(logits: Tensor) -> Tensor:
    """Return logits [R, V] as kernels take them: in a precision that may have some, each row contiguous."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _drawn_natively(kernels: Kernels, logits: Tensor, parameters: Parameters, uniforms: Tensor) -> Tensor:
    drawn = torch.empty(logits.shape[0], dtype=torch.long)
    columns = (parameters.temperature, parameters.top_p, parameters.top_k, parameters.min_p, uniforms, drawn)
    assert all(column.is_contiguous() and column.numel() == drawn.numel() for column in columns)
    task = _Draw(
        logits.data_ptr(), logits.stride(0), *logits.shape, *(column.data_ptr() for column in columns)
    )
    if drawn.numel():
        kernels.draw(ctypes.byref(task), torch.get_num_threads())
    return drawn


def drawn(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token [R] where the cumulative weights [R, V] pass a share of their total."""
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    # Rounding must not lift the target to the total: no token lies there.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True)[:, 0]


def filtered(logits: Tensor, parameters: Parameters) -> Tensor:
    """Return weights [R, V] of the tokens left by temperature, top_k, top_p and min_p in this order; else 0.

    Tokens as probable as the last one kept are kept too, so that the order of equals decides nothing.
    """
    weights = weights_of(logits, parameters)
    if bool((parameters.top_k > 0).any()) or bool((parameters.top_p < 1).any()):
        weights = torch.where(weights >= _threshold(weights, parameters), weights, 0.0)
    return torch.where(weights >= parameters.min_p, weights, 0.0)


def weights_of(logits: Tensor, parameters: Parameters) -> Tensor:
    """Return what the tokens' probabilities are to that of the first one [R, V], before any is left out."""
    scaled = logits.double() / parameters.temperature
    return torch.exp(scaled - scaled.amax(dim=-1, keepdim=True))


def _threshold(weights: Tensor, parameters: Parameters) -> Tensor:
    """Return the smallest weight that top_k and top_p keep [R, 1]; `weights` [R, V] are at most 1."""
    threshold, undecided = first_threshold(weights, parameters)
    if undecided is None or not bool(undecided.any()):
        return threshold
    # A flat distribution: its nucleus is longer than the first candidates.
    return _threshold_among(weights.topk(weights.shape[-1], dim=-1).values, weights, parameters)[0]


def first_threshold(weights: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor | None]:
    """Return the smallest weight that top_k and top_p keep [R, 1] as the first candidates have it, and whose
    they do not decide [R, 1]; None: they are all tokens. Does not wait for the device.
    """
    vocabulary = weights.shape[-1]
    ranked = weights.topk(min(vocabulary, FIRST_CANDIDATES), dim=-1).values
    threshold, undecided = _threshold_among(ranked, weights, parameters)
    return threshold, undecided if vocabulary > FIRST_CANDIDATES else None


def _threshold_among(ranked: Tensor, weights: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor]:
    candidates = ranked.shape[-1]
    by_k = parameters.top_k > 0
    last_k = (torch.where(by_k, parameters.top_k, 1).clamp(max=candidates) - 1).long()
    kth = torch.where(by_k, ranked.gather(-1, last_k), 0.0)
    total = torch.where(weights >= kth, weights, 0.0).sum(dim=-1, keepdim=True)
    kept = torch.where(ranked >= kth, ranked, 0.0)
    before = kept.cumsum(dim=-1) - kept
    by_p = parameters.top_p < 1
    # A token is in the nucleus while those before it do not fill it; the first one always is.
    length = (before < parameters.top_p * total).sum(dim=-1, keepdim=True).clamp(min=1)
    nucleus = torch.where(by_p, ranked.gather(-1, length - 1), 0.0)
    undecided = (by_p & (length == candidates)) | (parameters.top_k > candidates)
    return torch.maximum(kth, nucleus), undecided
