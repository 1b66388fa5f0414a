"""Weights of 4 and 8 bits beside those of 32: how much worse, how much smaller and how much faster.

`perplexity` is of the standard library's docstrings, half of which are kept to calibrate by;
`greedy_agreement` is over the float32 model's own continuations of HumanEval's prompts. `int4` is the method
of LONGHAUL_QUANTIZE, and `default` the group of it that is taken when none is said. Speeds are medians of
alternating runs.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from bench import int4_quality as quality
from worker.engine import Engine, EngineConfig, Request, Sampling, loader, smollm2
from worker.engine.quantize import writing
from worker.engine.quantize.recipe import Recipe

FULL = EngineConfig(device="cpu", dtype="float32", kv_memory_bytes=1 << 30)
_DEFAULT_GROUP = FULL.quantize_group
METHODS = ("int8", "int4-rtn", "int4", "int4-calibrated", "gguf")
_BATCH_SIZES = (1, 8, 64)
_GROUPS = (32, 64, 128)
_PROMPT_TOKENS, _OUTPUT_TOKENS, _WARM_UP_TOKENS = 32, 64, 4
_EMBEDDED = {"int8", "int4-rtn", "int4"}


@dataclass(frozen=True)
class Subject:
    """A model by a method: where it lies, and how an engine is to load it."""

    method: str
    group: int | None
    source: str
    config: EngineConfig


@click.command()
@click.option("--method", "methods", type=click.Choice(METHODS), multiple=True, default=METHODS)
@click.option("--group", "groups", type=click.Choice([str(g) for g in _GROUPS]), multiple=True)
@click.option("--tokens", type=click.IntRange(min=1), default=50_000, show_default=True, help="Of the text.")
@click.option("--speed/--no-speed", default=True, help="Also measure tokens a second.")
@click.option("--agreement/--no-agreement", default=True, help="Also measure agreement on HumanEval.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Of a speed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines and nothing else.")
def main(
    methods: tuple[str, ...],
    groups: tuple[str, ...],
    tokens: int,
    speed: bool,
    agreement: bool,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure what quantised weights cost and gain, with SmolLM2-135M-Instruct."""
    source = str(smollm2.ensure(report=True))
    measured, held_out = quality.docstrings()
    whole = loader.load(source, FULL)
    ids = whole.tokenizer(measured, verbose=False).input_ids
    facts: dict[str, Any] = {"perplexity_fp32": round(quality.perplexity(whole.model, ids, tokens), 4)}
    spoken = _spoken(source) if agreement else []
    if spoken:
        facts["humaneval_log_likelihood_fp32"] = quality.agreement(whole.model, spoken)[
            "humaneval_log_likelihood"
        ]
    del whole
    for name in methods:
        for group in _groups(name, groups):
            with subject(name, group, source, held_out) as found:
                line = _quality(found, ids, tokens, spoken) | facts
                if speed:
                    line |= speeds(found, source, repeats)
                click.echo(json.dumps(line) if as_json else "  ".join(f"{k} {v}" for k, v in line.items()))


def _groups(method: str, wanted: tuple[str, ...]) -> list[int]:
    if method == "gguf":
        return [32]
    chosen = [int(group) for group in wanted]
    return chosen or ([_DEFAULT_GROUP] if method == "int8" else list(_GROUPS))


@contextmanager
def subject(method: str, group: int, source: str, text: str) -> Iterator[Subject]:
    """Make a model by a method; it is gone at the end."""
    config = replace(FULL, quantize_group=group)
    if method == "gguf":
        yield Subject(method, group, str(smollm2.wheel_gguf()), FULL)
    elif method == "int4-calibrated":
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / "model"
            writing.write(source, target, Recipe(4, group, "calibrated"), text, FULL, lambda *_: None)
            yield Subject(method, group, str(target), FULL)
    else:
        config = replace(config, quantize="int8" if method == "int8" else "int4")
        yield Subject(method, group, source, replace(config, quantize_method=_method(method)))


def _method(name: str) -> Any:
    return "rtn" if name == "int4-rtn" else FULL.quantize_method


def _quality(found: Subject, ids: list[int], tokens: int, spoken: list[Any]) -> dict[str, Any]:
    started = time.perf_counter()
    model = loader.load(found.source, found.config).model
    seconds = time.perf_counter() - started
    return {
        "method": found.method,
        "group": found.group,
        "default": found.method == "int4" and found.group == _DEFAULT_GROUP,
        "perplexity": round(quality.perplexity(model, ids, tokens), 4),
        "linear_bytes_ratio_fp16": round(quality.linear_bytes_ratio(model), 4),
        "load_seconds": round(seconds, 1),
        **(quality.agreement(model, spoken) if spoken else {}),
        **_embedding(found),
    }


def _embedding(found: Subject) -> dict[str, float]:
    """Return how far embeddings turn away, by methods that need no head."""
    path = quality.embedder()
    if path is None or found.method not in _EMBEDDED:
        return {}
    made = []
    for config in (FULL, found.config):
        loaded = loader.load(str(path), replace(config, task="embed"))
        made.append(quality.embeddings(loaded.model, loaded.tokenizer))
    cosines = (made[0] * made[1]).sum(1)
    return {
        "embedding_cosine": round(float(cosines.mean()), 5),
        "embedding_cosine_least": round(float(cosines.min()), 5),
    }


def _spoken(source: str) -> list[tuple[list[int], list[int]]]:
    engine = Engine.load(source, FULL)
    try:
        return quality.continuations(engine)
    finally:
        engine.close()


def speeds(found: Subject, source: str, repeats: int) -> dict[str, dict[str, float]]:
    """Return output tokens a second by batch size, and those of the float32 model beside it."""
    rates: dict[str, dict[str, float]] = {"tokens_per_second": {}, "fp32_tokens_per_second": {}}
    for size in _BATCH_SIZES:
        engines = [
            Engine.load(where, replace(config, max_running=size))
            for where, config in ((found.source, found.config), (source, FULL))
        ]
        try:
            for engine in engines:
                _rate(engine, size, _WARM_UP_TOKENS)
            turns = [[_rate(engine, size, _OUTPUT_TOKENS) for engine in engines] for _ in range(repeats)]
        finally:
            for engine in engines:
                engine.close()
        for name, measured in zip(rates, zip(*turns, strict=True), strict=True):
            rates[name][str(size)] = round(statistics.median(measured), 1)
    return rates


def _rate(engine: Engine, size: int, tokens: int) -> float:
    engine.forget_prefixes()  # type: ignore[attr-defined]
    wanted = Sampling(tokens, temperature=0, ignore_eos=True)
    asked = [Request(str(i), [i + 100, *range(200, 199 + _PROMPT_TOKENS)], wanted) for i in range(size)]
    started = time.perf_counter()
    done = list(engine.generate(asked))
    return sum(len(completion.token_ids) for completion in done) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
