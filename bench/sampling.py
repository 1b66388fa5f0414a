"""What each sampling feature costs a decode step of 64 running requests, next to greedy.

The same prompts and output lengths for each, in turn in one process; `choosing_ms` is the choice of tokens
alone, on random logits. `--vocabulary` says how many of these; `--choosing` measures nothing else.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from bench import engine as engines
from bench import workloads
from worker.engine import Engine, EngineConfig, Request, Sampling, smollm2

RUNNING = 64
_PROMPT_TOKENS = 16
_CHOICES = 8
_STOP = ("\n\nHuman:", "</answer>", "\u2603\u2603", "never to be seen")
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40},
        "kind": {"enum": ["one", "two", "three"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 50},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "min_p": {"min_p": 0.05},
    "top_p+top_k+min_p": {"top_p": 0.9, "top_k": 50, "min_p": 0.05},
    "seed": {"seed": 2**63 + 12345},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 0.5},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 0.5},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "logit_bias": {"temperature": 0.0, "logit_bias": tuple((id, 1.0) for id in range(0, 500, 10))},
    "logprobs=5": {"temperature": 0.0, "logprobs": 5},
    "logprobs=20": {"temperature": 0.0, "logprobs": 20},
    "stop": {"temperature": 0.0, "stop": _STOP},
    "grammar": {"temperature": 0.0, "ignore_eos": False},
    f"n={_CHOICES}": {"n": _CHOICES},
}
# Not part of the choice of tokens, or more than that: measured in whole steps alone.
_AROUND_CHOOSING = ("stop", "grammar", f"n={_CHOICES}")


@click.command()
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Medians of these.")
@click.option("--tokens", type=click.IntRange(min=4), default=24, show_default=True, help="Of each output.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--feature", "only", type=click.Choice(list(FEATURES)), multiple=True, help="Only these.")
@click.option("--vocabulary", type=click.IntRange(min=500), help="The model's own when left out.")
@click.option("--choosing", is_flag=True, help="The choice of tokens alone, without a model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines and nothing else.")
def main(
    repeats: int,
    tokens: int,
    threads: int,
    only: tuple[str, ...],
    vocabulary: int | None,
    choosing: bool,
    as_json: bool,
) -> None:
    """Measure the step of SmolLM2 with each feature of sampling."""
    import torch

    torch.set_num_threads(threads)
    names = ["greedy", *(name for name in only or FEATURES if name != "greedy")]
    source = smollm2.ensure(report=True)
    alone = choosing_seconds(names, vocabulary or engines.Source.read(source).config.vocab_size, repeats)
    whole: dict[str, float] = {}
    if not choosing:
        config = EngineConfig(dtype="float32", kv_memory_bytes=1 << 30, max_running=RUNNING)
        engine = Engine.load(str(source), config)
        whole = step_seconds(engine, names, tokens, repeats)
        engine.close()
    for line in lines(names, whole, alone):
        click.echo(json.dumps(line) if as_json else _readable(line))


def step_seconds(engine: Engine, names: Sequence[str], tokens: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of a step that decodes for all, by feature."""
    cut = workloads.cutter(workloads.text_ids(engine.tokenizer), random.Random(0))
    prompts = [cut(_PROMPT_TOKENS) for _ in range(RUNNING)]

    def of(name: str) -> Callable[[], float]:
        return lambda: statistics.median(_decode_steps(engine, requests(name, prompts, tokens)))

    return in_turn({name: of(name) for name in names}, repeats)


def requests(name: str, prompts: Sequence[list[int]], tokens: int) -> list[Request]:
    """Return requests with a feature that have as many choices together as there are prompts."""
    fields = {"ignore_eos": True, "temperature": 0.8, **FEATURES[name]}
    if name == "grammar":
        fields["grammar"] = _grammar()
    return [
        Request(str(index), prompt, Sampling(tokens, **{"seed": index, **fields}))
        for index, prompt in enumerate(prompts[: len(prompts) // fields.get("n", 1)])
    ]


def choosing_seconds(names: Iterable[str], vocabulary: int, repeats: int) -> dict[str, float]:
    """Return the median seconds that choosing takes from random logits, by feature."""
    import torch

    logits = 3 * torch.randn(RUNNING, vocabulary, generator=torch.manual_seed(0))
    return in_turn(
        {name: _choosing(name, logits) for name in names if name not in _AROUND_CHOOSING}, 3 * repeats
    )


def in_turn(measured: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Return the medians of what each measures: first all once without counting, then all in turn."""
    for measure in measured.values():
        measure()
    found: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(repeats):
        for name, measure in measured.items():
            found[name].append(measure())
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _decode_steps(engine: Engine, wanted: list[Request]) -> list[float]:
    """Run requests; return the seconds of each step that gave all of them a token and prefilled nothing."""
    running = sum(request.sampling.n for request in wanted)
    forget = getattr(engine, "forget_prefixes", lambda: None)
    forget()  # so that each run finds the same: nothing
    engine.expects_more = False
    engine.add(wanted)
    found, stats = [], engine.stats
    while engine.has_work:
        sampled, prefilled = stats.tokens_sampled, stats.prefill_tokens_computed
        started = time.perf_counter()
        done = engine.step()
        seconds = time.perf_counter() - started
        if stats.tokens_sampled - sampled == running and stats.prefill_tokens_computed == prefilled:
            found.append(seconds)
        for completion in done:
            if completion.error:
                raise click.ClickException(f"request {completion.id}: {completion.error}")
    if not found:
        raise click.ClickException(f"no step decoded for all {running}: more --tokens are needed")
    return found


def _choosing(name: str, logits: Any) -> Callable[[], float]:
    from worker.engine import choosing
    from worker.engine.rows import RowState
    from worker.engine.types import Row

    history = [list(range(index, index + _PROMPT_TOKENS)) for index in range(len(logits))]
    states = [
        # The tokenizer would decode what is taken, but nothing is.
        RowState(Row(request, token_ids=list(request.prompt_ids)), None, frozenset())  # type: ignore[arg-type]
        for request in requests(name, history, 2 * _PROMPT_TOKENS)
    ]

    def measure() -> float:
        changing = logits.clone()
        started = time.perf_counter()
        choosing.choose(states, changing)
        return time.perf_counter() - started

    return measure


def _grammar() -> str:
    from jobs import grammars

    wanted = {"type": "json_schema", "json_schema": {"name": "figures", "schema": _SCHEMA, "strict": True}}
    grammar = grammars.build(wanted, [], "none", None, None, True)
    assert grammar is not None
    return grammar


def lines(names: Iterable[str], whole: dict[str, float], alone: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield a line for each feature, with what it costs more than greedy; what was not measured is None."""
    for name in names:
        line: dict[str, Any] = {"feature": name, "running": RUNNING}
        for kind, seconds in (("step", whole), ("choosing", alone)):
            known = name in seconds
            line[f"{kind}_ms"] = round(1000 * seconds[name], 2) if known else None
            line[f"{kind}_extra_ms"] = round(1000 * (seconds[name] - seconds["greedy"]), 2) if known else None
        yield line


def _readable(line: dict[str, Any]) -> str:
    def cost(kind: str) -> str:
        if line[f"{kind}_ms"] is None:
            return f"{kind} {'-':>7} {'':9}   "
        return f"{kind} {line[f'{kind}_ms']:7.2f} ms {line[f'{kind}_extra_ms']:+7.2f}  "

    return f"{line['feature']:20}{cost('step')}{cost('choosing')}".rstrip()


if __name__ == "__main__":
    main()
