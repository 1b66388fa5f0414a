"""Our engine on a GPU, or vLLM beside it: random weights in the shape of Qwen3-4B, greedy, fixed output
lengths.

Each run prints one JSON line a workload. `seconds_limit` is what the card could do at most, see gpu_limits;
the shares are of its memory bandwidth and matrix rate. Time to the first token counts from the start of the
run, when all requests are there. `summary` reads the lines back and prints a table.
"""

import dataclasses
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bench import qwen_like, workloads
from bench.workloads import Workload

_WARM_UP_TOKENS = 40
"""At most, each request another number: as they end, steps of all batch sizes are recorded."""
_FIELDS = (
    "engine",
    "workload",
    "requests",
    "tokens_per_second",
    "ttft_p50",
    "ttft_p90",
    "peak_gb",
    "bandwidth_share",
    "matrix_share",
)


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a run gave: tokens, seconds, and the seconds to the first token of each request that finished."""

    requests: int
    output_tokens: int
    seconds: float
    first: list[float]
    stats: dict[str, float]


Run = Callable[[Workload, float], Ran]


@click.group()
def main() -> None:
    """Measure an engine on a GPU."""


@main.command()
def versions() -> None:
    """Print what is installed, and the card."""
    import torch

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    names = ("torch", "transformers", "flash-attn", "triton", "vllm")
    found: dict[str, Any] = {"python": sys.version.split()[0]} | {name: version(name) for name in names}
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found["card"] = card.name
        found["card_gib"] = round(card.total_memory / (1 << 30), 1)
        found["capability"] = f"{card.major}.{card.minor}"
    _print({"figure": "versions"} | found)


@main.command()
@click.argument("engine", type=click.Choice(["longhaul", "vllm"]))
@click.option("--n", type=click.IntRange(min=1), default=2000, show_default=True, help="Requests.")
@click.option("--workload", "names", multiple=True, type=click.Choice(workloads.NAMES), help="Default: all.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="After which ours is cut off.")
@click.option("--max-running", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--config", default="{}", help="More fields of EngineConfig, as JSON.")
@click.option("--tiny", is_flag=True, help="Two small layers, to rehearse with.")
def run(
    engine: str,
    n: int,
    names: tuple[str, ...],
    seconds: float,
    max_running: int,
    config: str,
    tiny: bool,
) -> None:
    """Run the workloads on ENGINE, one JSON line each."""
    shape = qwen_like.TINY if tiny else qwen_like.CONFIG
    tokenizer = qwen_like.tokenizer(shape["vocab_size"], shape["max_position_embeddings"])
    load = _load_ours if engine == "longhaul" else _load_vllm
    started = time.perf_counter()
    running = load(shape, tokenizer, max_running, json.loads(config))
    _print({"figure": "load", "engine": engine, "seconds": round(time.perf_counter() - started, 1)})
    taken: set[int] = set()
    work = workloads.build(tokenizer, n)
    for name in names or workloads.NAMES:
        few = [
            (prompt, 1 + at % _WARM_UP_TOKENS) for at, (prompt, _) in enumerate(work[name][: 2 * max_running])
        ]
        running(workloads.apart(few, taken, range(1, shape["vocab_size"])), seconds / 4)
        turn = workloads.apart(work[name], taken, range(1, shape["vocab_size"]))
        _forget_peak()
        ran = running(turn, seconds)
        label = {"figure": "workload", "engine": engine, "workload": name, "n": n}
        _print(label | _figures(ran, turn, max_running))


@main.command()
@click.argument("lines", type=click.Path(exists=True, path_type=Path))
def summary(lines: Path) -> None:
    """Print a table of the runs in LINES."""
    found = [json.loads(line) for line in lines.read_text().splitlines() if line.startswith("{")]
    rows = [line for line in found if line.get("figure") == "workload"]
    print("| " + " | ".join(_FIELDS) + " |\n|" + "---|" * len(_FIELDS))
    for row in rows:
        print("| " + " | ".join("-" if row[name] is None else str(row[name]) for name in _FIELDS) + " |")
    ours = {row["workload"]: row for row in rows if row["engine"] == "longhaul"}
    for row in rows:
        if row["engine"] != "longhaul" and row["workload"] in ours:
            ratio = ours[row["workload"]]["tokens_per_second"] / row["tokens_per_second"]
            print(f"{row['workload']}: {ratio:.2f} times the tokens/s of {row['engine']}")


def _load_ours(shape: dict[str, Any], tokenizer: Any, max_running: int, fields: dict[str, Any]) -> Run:
    """Make the model on the device and open our engine over it, as a worker would."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from worker.engine import EngineConfig, loader, opening

    config = EngineConfig(max_running=max_running, **fields)
    device = loader.pick_device(config.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)
    engine = opening.over(loader.wrap(model, tokenizer), config, "bench")
    _print({"figure": "engine", "kind": type(engine).__name__, "kv_bytes": _kv_bytes(engine)})

    def run(workload: Workload, seconds: float) -> Ran:
        return _run_ours(engine, workload, seconds)

    return run


def _kv_bytes(engine: Any) -> int | None:
    memory = getattr(engine, "_memory", None)
    return None if memory is None else memory.budget


def _run_ours(engine: Any, workload: Workload, seconds: float) -> Ran:
    """Run a workload until it is done or its time is up."""
    from worker.engine import Request, Sampling

    before = engine.stats.to_dict()
    started, clock = time.perf_counter(), time.monotonic()
    engine.add(
        Request(str(index), prompt, Sampling(output, temperature=0, ignore_eos=True))
        for index, (prompt, output) in enumerate(workload)
    )
    engine.expects_more = False
    done = []
    while engine.has_work and time.perf_counter() - started < seconds:
        done += engine.step()
    passed = time.perf_counter() - started
    after = engine.stats.to_dict()
    stats = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    if engine.has_work:
        finished = {completion.id for completion in done}
        engine.cancel([str(index) for index in range(len(workload)) if str(index) not in finished])
        while engine.has_work:
            engine.step()
    failed = [completion.error for completion in done if completion.error]
    if failed:
        raise click.ClickException(f"{len(failed)} requests failed, the first with: {failed[0]}")
    firsts = [c.timings.first_token - clock for c in done if c.timings.first_token is not None]
    return Ran(len(done), int(stats.get("tokens_sampled", 0)), passed, firsts, stats)


def _load_vllm(shape: dict[str, Any], tokenizer: Any, max_running: int, fields: dict[str, Any]) -> Run:
    """Load vLLM with random weights of the same shape, in this process."""
    import tempfile

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    directory = qwen_like.write(Path(tempfile.mkdtemp()), shape)
    tokenizer.save_pretrained(directory)
    llm = LLM(
        model=str(directory),
        load_format="dummy",
        dtype=shape["dtype"],
        max_num_seqs=max_running,
        max_model_len=4096,
        gpu_memory_utilization=0.9 if shape is qwen_like.CONFIG else 0.2,
        enable_prefix_caching=True,
        disable_log_stats=False,  # else it does not say when first tokens came
        seed=0,
    )

    def run(workload: Workload, seconds: float) -> Ran:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in workload]
        wanted = [
            SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            for _, output in workload
        ]
        started = time.perf_counter()
        done = llm.generate(prompts, wanted, use_tqdm=False)
        passed = time.perf_counter() - started
        metrics = [each.metrics for each in done]
        firsts = [m.first_token_latency for m in metrics if m is not None]
        return Ran(len(done), sum(len(each.outputs[0].token_ids) for each in done), passed, firsts, {})

    return run


def _figures(ran: Ran, workload: Workload, running: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "requests": ran.requests,
        "output_tokens": ran.output_tokens,
        "seconds": round(ran.seconds, 2),
        "tokens_per_second": round(ran.output_tokens / ran.seconds, 1),
        "ttft_p50": _percentile(ran.first, 50),
        "ttft_p90": _percentile(ran.first, 90),
        "peak_gb": _peak_gb(),
    }
    return found | _shares(ran, workload, running) | {"stats": ran.stats}


def _shares(ran: Ran, workload: Workload, running: int) -> dict[str, Any]:
    """Return what a run made of the card; nothing of a card without known figures, or of a part of a run."""
    import torch

    names = ("seconds_limit", "bandwidth_share", "matrix_share")
    if not torch.cuda.is_available() or ran.requests < len(workload):
        return dict.fromkeys(names)
    try:
        from bench import gpu_limits
    except ImportError:  # vLLM's environment need not have what our engine needs
        return dict.fromkeys(names)
    card = gpu_limits.card_of(torch.cuda.get_device_name())
    if card is None:
        return dict.fromkeys(names)
    work = gpu_limits.of_workload(gpu_limits.qwen_like_footprint(running), workload, running)
    values = (
        work.seconds(card),
        work.bytes / card.bandwidth / ran.seconds,
        work.flops / card.flops / ran.seconds,
    )
    return {name: round(value, 3) for name, value in zip(names, values, strict=True)}


def _percentile(values: list[float], percent: int) -> float | None:
    if len(values) < 2:
        return None
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 3)


def _forget_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_gb() -> float | None:
    """Return the most that torch has held of the card, KV that is reserved included."""
    import torch

    return round(torch.cuda.max_memory_reserved() / 1e9, 2) if torch.cuda.is_available() else None


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
