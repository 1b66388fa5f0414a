"""What a GPU could do at most, from two figures of its maker: bytes a second of its memory, and flops a
second of its matrix units.

A decode step reads every weight once and the KV of every request; each token costs 2 flops for every weight
and, for every key, 2 flops for every channel of a query and of a value (`Footprint.attention`). A prefill is
the same products for all tokens at once, without the head. The limit is the larger of both times. Norms,
launches, the choice of tokens and the way from one kernel to the next are not counted.

`python -m bench.gpu_limits` prints the table of docs/gpu.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench import limit, qwen_like
from bench.workloads import Workload
from worker.engine import EngineConfig, footprint, sizing
from worker.engine.footprint import Footprint

BATCHES = (1, 16, 64, 256)
CONTEXT = 1024
"""Tokens a request has while it decodes, and those of a prompt that is prefilled."""


@dataclass(frozen=True)
class Card:
    """`bandwidth` bytes and `flops` (bfloat16, dense, sums in float32) a second; `device` is in the name that
    CUDA gives it, `source` the page of its maker.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    device: str
    source: str


CARDS = (
    Card("A10G", 24, 600e9, 70e12, "A10G", "NVIDIA A10G data sheet"),
    Card("RTX 4090", 24, 1008e9, 165.2e12, "RTX 4090", "NVIDIA Ada GPU Architecture white paper"),
    Card("L40S", 48, 864e9, 362.05e12, "L40S", "NVIDIA L40S data sheet"),
    Card("A100 40 GB", 40, 1555e9, 312e12, "A100-SXM4-40GB", "NVIDIA A100 data sheet"),
    Card("A100 80 GB SXM", 80, 2039e9, 312e12, "A100-SXM4-80GB", "NVIDIA A100 data sheet"),
    Card("H100 SXM", 80, 3350e9, 989.5e12, "H100 80GB HBM3", "NVIDIA H100 data sheet"),
    Card("H200 SXM", 141, 4800e9, 989.5e12, "H200", "NVIDIA H200 data sheet"),
)


@dataclass(frozen=True)
class Work:
    """What must be read, in bytes, and computed, in flops."""

    bytes: float
    flops: float

    def seconds(self, card: Card) -> float:
        return max(self.bytes / card.bandwidth, self.flops / card.flops)


def card_of(device_name: str) -> Card | None:
    """Return the card that CUDA calls so, if its figures are known."""
    return next((card for card in CARDS if card.device in device_name), None)


def decode_step(need: Footprint, batch: int, context: float) -> Work:
    """Return what one step takes in which each of a batch, with so many tokens, gets its next one."""
    weights = need.products + need.head
    keys = batch * context
    return Work(
        weights * need.dtype.itemsize + keys * need.token_bytes,
        batch * 2 * weights + keys * 2 * need.attention,
    )


def prefill(need: Footprint, tokens: int, prompt: float) -> Work:
    """Return what so many tokens of prompts of one length take: each sees half a prompt."""
    keys = tokens * prompt / 2
    return Work(need.products * need.dtype.itemsize, tokens * 2 * need.products + keys * 2 * need.attention)


def of_workload(need: Footprint, workload: Workload, running: int) -> Work:
    """Return what a workload takes when so many requests run, each prefix is computed once, and each request
    reads its own keys: attending once for several may need less.
    """
    prompts: Sequence[list[int]] = [prompt for prompt, _ in workload]
    outputs = sum(output for _, output in workload)
    batch = min(running, len(workload))
    context = sum((len(prompt) + output / 2) * output for prompt, output in workload) / outputs
    step, steps = decode_step(need, batch, context), outputs / batch
    mean = sum(map(len, prompts)) / len(prompts)
    first = prefill(need, limit.distinct_tokens(prompts), mean)
    return Work(first.bytes + steps * step.bytes, first.flops + steps * step.flops)


def table(need: Footprint) -> str:
    """Return the Markdown table of what each card could do at most."""
    head = ["card", "TB/s", "TFLOP/s", *(f"decode, batch {batch}" for batch in BATCHES), "prefill"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for card in CARDS:
        rates = [_decode_rate(need, card, batch) for batch in BATCHES]
        tokens = 8192
        rate = f"{_rounded(tokens / prefill(need, tokens, CONTEXT).seconds(card)):,}"
        cells = [card.name, f"{card.bandwidth / 1e12:.2f}", f"{card.flops / 1e12:.0f}", *rates, rate]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _decode_rate(need: Footprint, card: Card, batch: int) -> str:
    """Return tokens per second; nothing where the card has no room for the batch's KV."""
    plan = sizing.plan(need, card.memory * 10**9, CONTEXT, batch)
    if plan.requests < batch:
        return ""
    return f"{_rounded(batch / decode_step(need, batch, CONTEXT).seconds(card)):,}"


def _rounded(rate: float) -> int:
    """Return two figures: more would promise something."""
    digits = len(str(int(rate))) - 2
    return round(rate / 10**digits) * 10**digits


def qwen_like_footprint(running: int = 256) -> Footprint:
    """Return what bench.qwen_like takes in bfloat16."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as directory:
        source = qwen_like.write(Path(directory))
        return footprint.of_source(str(source), EngineConfig(max_running=running), torch.bfloat16)


if __name__ == "__main__":
    print(table(qwen_like_footprint()))
