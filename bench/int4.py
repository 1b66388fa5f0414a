"""Weights of 4 and 8 bits beside those of 32: how much worse, how much smaller and how much faster.

A line for each method and group. `int4` is the method of LONGHAUL_QUANTIZE, and `default` the group of it
that is taken when none is said. `perplexity` is of the standard library's docstrings, half of which are kept
to calibrate by; `greedy_agreement` over the float32 model's own continuations of HumanEval's prompts;
`layer_error` of each product's outputs, over a few windows of the docstrings measured by. Speeds are medians
of alternating runs, and are measured once for methods whose integers have the same format.
`bandwidth_limit_tokens_per_second` is what one request at a time would get if a step did nothing but read
the weights from memory; where a cache holds them, more is possible.
"""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from bench import bandwidth, int4_memory, int4_speed
from bench import int4_quality as quality
from bench.children import ChildFailed
from bench.int4_layers import layer_error
from bench.int4_subjects import FULL, METHODS, Subject, groups, subject
from worker.engine import Engine, loader, smollm2
from worker.engine.quantize.recipe import GROUPS

_EMBEDDED = {"int8", "int4-rtn", "int4"}
_CORES = len(os.sched_getaffinity(0))


@click.command()
@click.option("--method", "methods", type=click.Choice(METHODS), multiple=True, default=METHODS)
@click.option("--group", "wanted", type=click.Choice([str(g) for g in sorted(GROUPS)]), multiple=True)
@click.option("--tokens", type=click.IntRange(min=1), default=50_000, show_default=True, help="Of the text.")
@click.option("--quality/--no-quality", "judged", default=True, help="Measure perplexity and layers.")
@click.option("--agreement/--no-agreement", default=True, help="Also measure agreement on HumanEval.")
@click.option("--memory/--no-memory", default=True, help="Also measure resident memory.")
@click.option("--speed/--no-speed", default=True, help="Also measure tokens a second.")
@click.option("--peers/--no-peers", default=True, help="Beside the peers that are installed.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Of a speed.")
@click.option("--threads", type=click.IntRange(min=1), default=_CORES, show_default=True)
@click.option(
    "--head", type=click.Choice(["auto", "keep", "int8"]), default="auto", help="LONGHAUL_QUANTIZE_HEAD."
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False),
    help=f"Directory of a model; {smollm2.NAME} when left out, whose GGUF file alone is known.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines and nothing else.")
def main(
    methods: tuple[str, ...],
    wanted: tuple[str, ...],
    model: str | None,
    head: str,
    as_json: bool,
    peers: bool,
    threads: int,
    **parts: Any,
) -> None:
    """Measure what quantised weights cost and gain, with SmolLM2-135M-Instruct."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # heard by the loader, and by what is measured in children
    torch.set_num_threads(threads)
    with_gguf = model is None
    found_peers = int4_speed.installed(with_gguf) if peers and parts["speed"] else []
    bench = _Bench(model or str(smollm2.ensure(report=True)), threads, found_peers, **parts)
    try:
        for method in methods:
            for group in groups(method, wanted) if with_gguf or method != "gguf" else []:
                with subject(method, group, bench.source, bench.held_out, head) as found:
                    line = bench.line(found)
                click.echo(json.dumps(line) if as_json else "  ".join(f"{k} {v}" for k, v in line.items()))
    except ChildFailed as error:
        sys.exit(f"longhaul: {error}")


@dataclass
class _Bench:
    """What is measured, by parts, and what of the float32 model is measured once."""

    source: str
    threads: int
    peers: list[str]
    judged: bool
    agreement: bool
    memory: bool
    speed: bool
    tokens: int
    repeats: int
    facts: dict[str, Any] = field(default_factory=dict)
    spoken: list[Any] = field(default_factory=list)
    speeds: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        measured, self.held_out = quality.docstrings()
        self.full = loader.load(self.source, FULL)
        self.ids = self.full.tokenizer(measured, verbose=False).input_ids
        self.facts["memory_bytes_per_second"] = round(bandwidth.read_bytes_per_second())
        self.facts["bandwidth_limit_tokens_per_second_fp32"] = self._limit(self.full.model)
        if self.judged:
            perplexity = quality.perplexity(self.full.model, self.ids, self.tokens)
            self.facts["perplexity_fp32"] = round(perplexity, 4)
        if self.agreement:
            self.spoken = _spoken(self.source)
            agreed = quality.agreement(self.full.model, self.spoken)
            self.facts["humaneval_log_likelihood_fp32"] = agreed["humaneval_log_likelihood"]
        if self.memory:
            numbers = sum(each.numel() for each in self.full.model.parameters())
            self.facts |= {"model_bytes_fp16": 2 * numbers, **int4_memory.fp32(self.source)}

    def line(self, found: Subject) -> dict[str, Any]:
        """Return all that is to be measured of a subject."""
        line = {"method": found.method, "group": found.group, "default": found.is_default}
        line |= self._loaded(found)
        if self.memory:
            line |= int4_memory.measure(found)
        if self.speed:
            if found.format not in self.speeds:
                self.speeds[found.format] = int4_speed.measure(
                    found, self.source, self.peers, self.repeats, self.threads
                )
            line |= self.speeds[found.format]
        return line | self.facts

    def _loaded(self, found: Subject) -> dict[str, Any]:
        """Return what is measured of the model in this process; it is gone afterwards."""
        started = time.perf_counter()
        model = loader.load(found.source, found.config).model
        line: dict[str, Any] = {"load_seconds": round(time.perf_counter() - started, 1)}
        line["linear_bytes_ratio_fp16"] = round(quality.linear_bytes_ratio(model), 4)
        line["bandwidth_limit_tokens_per_second"] = self._limit(model)
        if self.judged:
            line["perplexity"] = round(quality.perplexity(model, self.ids, self.tokens), 4)
            line["layer_error"] = layer_error(self.full.model, model, self.ids)
            line |= _embedding(found)
        return line | (quality.agreement(model, self.spoken) if self.spoken else {})

    def _limit(self, model: Any) -> float:
        return round(self.facts["memory_bytes_per_second"] / bandwidth.step_bytes(model), 1)


def _embedding(found: Subject) -> dict[str, float]:
    """Return how far embeddings turn away, by methods that need no head."""
    path = quality.embedder()
    if path is None or found.method not in _EMBEDDED:
        return {}
    return quality.cosines(Path(path), FULL, found.config)


def _spoken(source: str) -> list[tuple[list[int], list[int]]]:
    engine = Engine.load(source, FULL)
    try:
        return quality.continuations(engine)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
