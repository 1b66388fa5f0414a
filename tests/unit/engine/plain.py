"""What a request's parameters mean, said plainly: for each token a forward of all before it, no batch."""

import functools
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from worker.engine import Sampling, seeds


def choose(logits: Tensor, sampling: Sampling, prompt: list[int], sampled: list[int], end: set[int]) -> int:
    """Return the next token from a row of float64 logits [V]."""
    row = logits.tolist()
    for token in set(prompt) | set(sampled):
        factor = sampling.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token, count in Counter(sampled).items():
        row[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, bias in sampling.logit_bias:
        row[token] += bias
    if len(sampled) + 1 < sampling.min_tokens:
        for token in end:
            row[token] = -math.inf
    if sampling.temperature == 0:
        return max(range(len(row)), key=lambda token: (row[token], -token))
    return _draw(row, sampling, seeds.uniform(sampling.seed, len(sampled)))


def _draw(row: list[float], sampling: Sampling, uniform: float) -> int:
    highest = max(row)
    weights = [math.exp((logit - highest) / sampling.temperature) for logit in row]
    if sampling.top_k:
        kth = sorted(weights, reverse=True)[min(sampling.top_k, len(weights)) - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    if sampling.top_p < 1:
        total, before, last = sum(weights), 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            if before >= sampling.top_p * total:
                break
            before, last = before + weight, weight
        weights = [w if w >= last else 0.0 for w in weights]
    weights = [w if w >= sampling.min_p else 0.0 for w in weights]
    target, so_far = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        so_far += weight
        if so_far > target:
            return token
    return max(token for token, weight in enumerate(weights) if weight)


def logits_of(model: Any, ids: list[int]) -> Tensor:
    """Return the logits [T, V] of a sequence, in float64."""
    return _logits_of(model, tuple(ids))


@functools.lru_cache(maxsize=10_000)  # examples have much in common
@torch.inference_mode()
def _logits_of(model: Any, ids: tuple[int, ...]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    return logits


def run(model: Any, prompt: list[int], sampling: Sampling, end: set[int]) -> tuple[list[int], list[Tensor]]:
    """Return the tokens of one choice, and the log softmax [V] that each was chosen under."""
    sampled: list[int] = []
    under = []
    while len(sampled) < sampling.max_tokens and not end & set(sampled[-1:]):
        logits = logits_of(model, prompt + sampled)[-1]
        under.append(logits.log_softmax(-1))
        sampled.append(choose(logits, sampling, prompt, sampled, end))
    return sampled, under
