"""How fast a workload could possibly run on this CPU in fp32: a lower bound to hold an engine against.

Counted: every prefix token once, every matrix product with packed weights at the batch sizes that occur, the
attention products at the same rate. Not counted: norms, rotary embedding, softmax, copies, scheduling. The
products are timed here and now, since a machine's speed changes by the minute. For decoders with
grouped-query attention and a gated MLP.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Shape = tuple[int, int, int]
"""Inputs and outputs of a weight, and how many layers have one."""

_ROUND_ROWS = 8
_COPIES = 12
_BYTES_OF_COPIES = 2_000_000_000
_TRIES = 5
_CHUNK = 512


@dataclass(frozen=True)
class Limit:
    """The bound in seconds, the tokens that must be prefilled, and the decode steps of the longest output."""

    seconds: float
    prefill_tokens: int
    decode_steps: int


def distinct_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """Count the nodes of the prompts' token trie: what must be prefilled when every prefix is computed once.

    In sorted order the longest prefix that a prompt shares with any earlier one is that with its neighbour.
    """
    ordered = sorted(list(prompt) for prompt in prompts)
    repeated = sum(_common(a, b) for a, b in pairwise(ordered))
    return sum(map(len, ordered)) - repeated


def packed_seconds(rows: int, shapes: Iterable[Shape]) -> float:
    """Time one packed product of `rows` rows with each weight of `shapes`; the best of five tries.

    Several copies of each weight take turns, so that they come from memory as in a model.
    """
    import torch

    total = 0.0
    for inputs, outputs, layers in shapes:
        fitting = _BYTES_OF_COPIES // (inputs * outputs * 4)
        weights = [
            torch.ops.mkldnn._reorder_linear_weight(torch.randn(outputs, inputs), rows)
            for _ in range(max(2, min(_COPIES, fitting)))
        ]
        x = torch.randn(rows, inputs)  # [rows, inputs]
        total += layers * min(_pass_seconds(x, weights) for _ in range(_TRIES)) / len(weights)
    return total


def estimate(
    config: Any,
    workload: Sequence[tuple[Sequence[int], int]],
    measure: Callable[[int, list[Shape]], float] = packed_seconds,
) -> Limit:
    """Return the limit of a workload for the decoder that a transformers config describes."""
    layers, width = config.num_hidden_layers, config.hidden_size
    body, head, queries = _shapes(config)
    lengths = [(len(prompt), output) for prompt, output in workload]
    distinct = distinct_tokens(prompt for prompt, _ in workload)

    chunk = measure(_CHUNK, body)
    flops_a_second = _CHUNK * sum(2 * inputs * outputs * times for inputs, outputs, times in body) / chunk
    prefill = distinct / _CHUNK * chunk + measure(len(workload), [(width, head, 1)])

    # Scores and weighted values: 4 flops for each query channel and key, in every layer.
    keys_of_prefill = distinct * sum(prompt for prompt, _ in lengths) / len(lengths) / 2
    keys_of_decode = sum((prompt + output / 2) * output for prompt, output in lengths)
    attention = (keys_of_prefill + keys_of_decode) * 4 * queries * layers / flops_a_second

    steps = max(output for _, output in lengths) - 1
    decode = _decode_seconds([output for _, output in lengths], [*body, (width, head, 1)], measure)
    return Limit(prefill + decode + attention, distinct, steps)


def _decode_seconds(
    outputs: list[int], shapes: list[Shape], measure: Callable[[int, list[Shape]], float]
) -> float:
    """Sum the steps after the first token; batch sizes are timed rounded up to a multiple of eight."""
    per_row: dict[int, float] = {}
    total = 0.0
    for step in range(1, max(outputs)):
        running = sum(output > step for output in outputs)
        size = -(-running // _ROUND_ROWS) * _ROUND_ROWS
        if size not in per_row:
            per_row[size] = measure(size, shapes) / size
        total += running * per_row[size]
    return total


def _shapes(config: Any) -> tuple[list[Shape], int, int]:
    """Return the merged weights of all layers, the vocabulary, and the channels of all query heads."""
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries = config.num_attention_heads * head_dim
    keys_and_values = 2 * config.num_key_value_heads * head_dim
    body = [
        (width, queries + keys_and_values, layers),
        (queries, width, layers),
        (width, 2 * inner, layers),
        (inner, width, layers),
    ]
    return body, config.vocab_size, queries


def _pass_seconds(x: Any, weights: list[Any]) -> float:
    import torch

    started = time.perf_counter()
    for weight in weights:
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return time.perf_counter() - started


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two prompts have in common from their start."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
