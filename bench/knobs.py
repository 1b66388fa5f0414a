"""What the engine's knobs do: the same requests under each setting, one JSON line for each.

`--arrivals 0` adds all requests at once; otherwise one every so many seconds, as small jobs come in.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import click

from bench import workloads
from bench.workloads import Workload
from worker.engine import Completion, Engine, EngineConfig, Request, Sampling, smollm2

_BASE = EngineConfig(dtype="float32", kv_memory_bytes=4 << 30)
AT_ONCE: tuple[dict[str, Any], ...] = (
    *({"max_running": running} for running in (8, 16, 32, 64)),
    *({"prefill_chunk_tokens": tokens} for tokens in (64, 128, 2048)),
    {"max_batch_tokens": 4000},
    {"share_prefixes": False},
)
ARRIVING: tuple[dict[str, Any], ...] = (
    {},
    {"max_queue_delay_seconds": 0.5},
    {"max_queue_delay_seconds": 2.0},
    {"max_queue_delay_seconds": 2.0, "preferred_batch_sizes": (8,)},
)


@click.command()
@click.option("--workload", type=click.Choice(workloads.NAMES), default="nested", show_default=True)
@click.option("--n", type=click.IntRange(min=1), default=64, show_default=True, help="Requests.")
@click.option("--arrivals", type=click.FloatRange(min=0), default=0.0, help="Seconds apart.")
def main(workload: str, n: int, arrivals: float) -> None:
    """Run a WORKLOAD under each setting of the engine's knobs."""
    source = str(smollm2.ensure(report=True))
    for changed in ARRIVING if arrivals else AT_ONCE:
        engine = Engine.load(source, dataclasses.replace(_BASE, **changed))
        work = workloads.build(engine.tokenizer, n, 0)[workload]
        _run(engine, work[:4], 0)
        click.echo(json.dumps({"workload": workload, "n": n, **changed} | measure(engine, work, arrivals)))
        engine.close()


def measure(engine: Engine, work: Workload, arrivals: float) -> dict[str, float]:
    """Return seconds, output tokens per second, and medians and the longest step of a run."""
    started = time.monotonic()
    added, done, longest = _run(engine, work, arrivals)
    seconds = time.monotonic() - started
    first = [_first_token(completion) - added[completion.id] for completion in done]
    whole = [completion.timings.finished - added[completion.id] for completion in done]
    return {
        "seconds": round(seconds, 2),
        "output_tokens_per_second": round(sum(len(c.token_ids) for c in done) / seconds, 1),
        "time_to_first_token_p50": round(statistics.median(first), 2),
        "end_to_end_p50": round(statistics.median(whole), 2),
        "longest_step_seconds": round(longest, 3),
    }


def _run(engine: Engine, work: Workload, arrivals: float) -> tuple[dict[str, float], list[Completion], float]:
    """Run requests that come in so many seconds apart; return when each did, and the longest step."""
    waiting = _requests(work)
    started, added, done, longest = time.monotonic(), {}, [], 0.0
    request = next(waiting, None)
    while request is not None or engine.has_work:
        while request is not None and time.monotonic() >= started + len(added) * arrivals:
            added[request.id] = time.monotonic()
            engine.add([request])
            request = next(waiting, None)
        engine.expects_more = request is not None
        before = time.monotonic()
        done += engine.step()
        longest = max(longest, time.monotonic() - before)
    return added, done, longest


def _requests(work: Workload) -> Iterator[Request]:
    for index, (prompt, output) in enumerate(work):
        yield Request(str(index), prompt, Sampling(output, temperature=0, ignore_eos=True))


def _first_token(completion: Completion) -> float:
    assert completion.timings.first_token is not None, completion.error
    return completion.timings.first_token


if __name__ == "__main__":
    main()
