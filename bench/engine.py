"""The engine against its peers: the same model, fp32, greedy, fixed output lengths, in alternating runs.

Each engine has a process that loads it once. In turn ours and the peer run the same workload; no repeat finds
KV of an earlier one, because its prompts begin with other tokens. `limit_seconds` is measured before each
turn. Peers are installed by `make bench-peers`.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench import figures, limit, workloads
from bench.children import OURS, PEERS, Child, ChildFailed, Run, equal_share
from bench.workloads import Workload
from worker.engine import smollm2

_WARM_UP_REQUESTS = 8
_WARM_UP_TOKENS = 4
_AGREEMENT_REQUESTS = 8
_OURS_ALONE = ("sizes", "plan")
_SIZES = (64, 256)
_FIGURES = ("ttft", "batch", "steps", "agreement", "sizes", "plan")


@dataclass(frozen=True)
class Source:
    """A model's directory, and what is read from it: the config and prompts for `workloads`."""

    model: Path
    config: Any
    tokenizer: Any

    @classmethod
    def read(cls, model: Path) -> "Source":
        from transformers import AutoConfig, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()  # the text is longer than any context, on purpose
        config = AutoConfig.from_pretrained(model).get_text_config()
        return cls(model, config, AutoTokenizer.from_pretrained(model))

    def inputs(self, seed: int) -> figures.Inputs:
        special = set(self.tokenizer.all_special_ids)
        usable = [id for id in range(self.config.vocab_size) if id not in special]
        return figures.Inputs(workloads.text_ids(self.tokenizer), usable, seed)


@click.command()
@click.option("--workload", type=click.Choice(workloads.NAMES), help="What to run.")
@click.option("--figure", type=click.Choice(_FIGURES), help="One figure about the engine instead.")
@click.option("--peer", type=click.Choice(PEERS), help="Without one, ours alone.")
@click.option("--n", type=click.IntRange(min=1), default=64, show_default=True, help="Requests.")
@click.option("--seed", default=0, show_default=True, help="Of the workload.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Medians of these.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=f"Directory of a model; {smollm2.NAME} when left out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines and nothing else.")
def main(
    workload: str | None,
    figure: str | None,
    peer: str | None,
    n: int,
    seed: int,
    repeats: int,
    threads: int,
    model: Path | None,
    as_json: bool,
) -> None:
    """Measure the engine on a WORKLOAD, next to a PEER; or a FIGURE."""
    if not (workload or figure):
        raise click.UsageError("Missing option '--workload' (or '--figure').")
    if figure in _OURS_ALONE and peer:
        raise click.UsageError(f"--figure {figure} is about our engine alone: no --peer.")
    if figure == "agreement" and not peer:
        raise click.UsageError("--figure agreement compares with a --peer.")
    source = Source.read(model or smollm2.ensure(report=True))
    names = [OURS, peer] if peer else [OURS]
    if figure == "plan":
        show([plan(source, workload or "nested", n, seed, repeats)], as_json)
        return
    try:
        with ExitStack() as stack:
            engines = [stack.enter_context(Child(name, source.model, threads)) for name in names]
            if figure:
                lines = measure_figure(engines, source, figure, workload or "mixed", n, seed, repeats)
            else:
                assert workload
                lines = compare(engines, source, workload, n, seed, repeats, threads)
            show(lines, as_json)
    except ChildFailed as error:
        sys.exit(f"longhaul: {error}")


def compare(
    engines: Sequence[Child], source: Source, name: str, n: int, seed: int, repeats: int, threads: int
) -> Iterator[dict[str, Any]]:
    """Run the engines in turn; yield one line for each, and the ratio of the first to the second."""
    import torch

    torch.set_num_threads(threads)
    inputs = source.inputs(seed)
    work = workloads.build(source.tokenizer, n, seed)[name]
    warm_up(engines, inputs, work)
    limits: list[float] = []
    runs: list[list[Run]] = [[] for _ in engines]
    for _ in range(repeats):
        turn = inputs.fresh(work)
        limits.append(limit.estimate(source.config, turn).seconds)
        for engine, done in zip(engines, runs, strict=True):
            done.append(engine.run(turn))
    seconds: list[float] = []
    for engine, done in zip(engines, runs, strict=True):
        line: dict[str, Any] = {"engine": engine.name, "workload": name, "n": n, "seed": seed} | summary(done)
        seconds.append(line["seconds"])
        yield line | {"limit_seconds": round(statistics.median(limits), 3)}
    if len(engines) == 2:
        ours, theirs = ([output for run in done for output in run.outputs] for done in runs)
        share = equal_share(ours, theirs)
        click.echo(f"outputs equal to those of {engines[1].name}: {share:.1%} of {len(ours)}", err=True)
        yield {"workload": name, "peer": engines[1].name, "ratio": round(seconds[0] / seconds[1], 4)}


def warm_up(engines: Sequence[Child], inputs: figures.Inputs, work: Workload) -> None:
    """Let each engine compile and allocate what it does at first use: a few requests, a few tokens."""
    few = [(prompt, min(output, _WARM_UP_TOKENS)) for prompt, output in work[:_WARM_UP_REQUESTS]]
    for engine in engines:
        engine.run(inputs.fresh(few))


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the medians of an engine's runs."""
    seconds = statistics.median(run.seconds for run in runs)
    computed = [run.prefill_tokens_computed for run in runs if run.prefill_tokens_computed is not None]
    return {
        "seconds": round(seconds, 3),
        "output_tokens": runs[0].output_tokens,
        "output_tokens_per_second": round(runs[0].output_tokens / seconds, 2),
        "prefill_tokens_computed": statistics.median_low(computed) if computed else None,
        "peak_bytes": statistics.median_low([run.peak_bytes for run in runs]),
    }


def measure_figure(
    engines: Sequence[Child], source: Source, figure: str, name: str, n: int, seed: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield one line for each engine, or the engines' agreement."""
    inputs = source.inputs(seed)
    work = workloads.build(source.tokenizer, n, seed)[name]
    warm_up(engines, inputs, work)
    if figure == "agreement":
        few = inputs.fresh(work[:_AGREEMENT_REQUESTS])
        ours, theirs = (engine.run(few).outputs for engine in engines)
        share = round(equal_share(ours, theirs), 4)
        yield {"figure": figure, "peer": engines[1].name, "requests": len(few), "equal_outputs": share}
        return
    for engine in engines:
        label = {"figure": figure, "engine": engine.name, "seed": seed}
        if figure == "sizes":
            works = (workloads.build(source.tokenizer, size, seed)[name] for size in sorted({*_SIZES, n}))
            for found in figures.sizes(engine, inputs, repeats, works):
                yield label | {"workload": name} | _rounded(found)
            continue
        if figure == "ttft":
            found = figures.ttft(engine, inputs, repeats)
        elif figure == "batch":
            found = figures.batch(engine, inputs, repeats)
        else:
            found = {"workload": name, "n": n} | figures.steps(engine, inputs, repeats, work)
        yield label | _rounded(found)


def plan(source: Source, name: str, n: int, seed: int, repeats: int) -> dict[str, Any]:
    """Measure in this process what it costs to plan a workload's requests; no model is loaded."""
    from bench import planning

    work = workloads.one(workloads.text_ids(source.tokenizer), name, n, seed)
    return {"figure": "plan", "workload": name, "seed": seed} | _rounded(planning.measure(work, repeats))


def show(lines: Iterable[dict[str, Any]], as_json: bool) -> None:
    for line in lines:
        click.echo(json.dumps(line) if as_json else _readable(line))


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in found.items()}


def _readable(line: dict[str, Any]) -> str:
    return "  ".join(f"{key} {'-' if value is None else value}" for key, value in line.items())


if __name__ == "__main__":
    main()
