"""Single figures about an engine: what a cached prefix, a batch, and each step are worth."""

import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bench import workloads
from bench.children import Child
from bench.workloads import Workload

_PREFIX_TOKENS = 2000
_OWN_TOKENS = 32
_BATCH = 8
_BATCH_PROMPT_TOKENS = 32
_BATCH_OUTPUT_TOKENS = 64


@dataclass
class Inputs:
    """Where prompts come from. `fresh` makes a workload that shares no prefix with an earlier one."""

    ids: list[int]
    usable: list[int]
    seed: int = 0
    taken: set[int] = field(default_factory=set)

    def fresh(self, workload: Workload) -> Workload:
        return workloads.apart(workload, self.taken, self.usable)

    def cutter(self) -> Callable[[int], list[int]]:
        return workloads.cutter(self.ids, random.Random(self.seed))


def ttft(engine: Child, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Measure the time to the first token of a request, cold and when another has left its prefix."""
    cut = inputs.cutter()
    prefix = cut(_PREFIX_TOKENS)
    asked, earlier = (prefix + cut(_OWN_TOKENS) for _ in range(2))
    cold, cached = [], []
    for _ in range(repeats):
        cold.append(engine.run(inputs.fresh([(asked, 1)])).seconds)
        first, second = inputs.fresh([(earlier, 1), (asked, 1)])
        engine.run([first])
        cached.append(engine.run([second]).seconds)
    seconds = {"cold_seconds": statistics.median(cold), "cached_seconds": statistics.median(cached)}
    return seconds | {"ratio": seconds["cached_seconds"] / seconds["cold_seconds"]}


def batch(engine: Child, inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Measure tokens per second of eight requests at once against one alone."""
    cut = inputs.cutter()
    work = [(cut(_BATCH_PROMPT_TOKENS), _BATCH_OUTPUT_TOKENS) for _ in range(_BATCH)]
    one, eight = [], []
    for _ in range(repeats):
        fresh = inputs.fresh(work)
        one.append(_BATCH_OUTPUT_TOKENS / engine.run(fresh[:1]).seconds)
        fresh = inputs.fresh(work)
        eight.append(_BATCH * _BATCH_OUTPUT_TOKENS / engine.run(fresh).seconds)
    speeds = {"batch_1": statistics.median(one), "batch_8": statistics.median(eight)}
    return speeds | {"ratio": speeds["batch_8"] / speeds["batch_1"]}


def steps(engine: Child, inputs: Inputs, repeats: int, workload: Workload) -> dict[str, Any]:
    """Count steps with fewer than 8 running, and what scheduling takes of a step (None: not told)."""
    runs = [engine.run(inputs.fresh(workload)).stats for _ in range(repeats)]
    # Steps that an engine does not count itself were watched from outside, a little less exactly.
    own = bool(runs[0].get("steps"))
    few, whole = ("steps_below_8", "steps") if own else ("watched_steps_below_8", "watched_steps")
    return {
        "steps": statistics.median(run.get(whole, 0) for run in runs),
        "share_below_8": _share(runs, few, whole),
        "scheduling_share": _share(runs, "scheduling_seconds", "step_seconds"),
        "scheduling_seconds_per_step": _share(runs, "scheduling_seconds", whole),
    }


def sizes(engine: Child, inputs: Inputs, repeats: int, workloads: Iterable[Workload]) -> list[dict[str, Any]]:
    """Measure seconds per output token of workloads of growing size; `ratio` is to the first of them."""
    found: list[dict[str, Any]] = []
    for work in workloads:
        runs = [engine.run(inputs.fresh(work)) for _ in range(repeats)]
        cost = statistics.median(run.seconds / run.output_tokens for run in runs)
        ratio = cost / found[0]["seconds_per_output_token"] if found else 1.0
        found.append({"n": len(work), "seconds_per_output_token": cost, "ratio": ratio})
    return found


def _share(runs: list[dict[str, float]], part: str, whole: str) -> float | None:
    shares = [run[part] / run[whole] for run in runs if part in run and run.get(whole)]
    return statistics.median(shares) if shares else None
