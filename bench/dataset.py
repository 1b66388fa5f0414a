"""`longhaul generate` as a whole: beside a script around vLLM, and its memory at a million rows.

    python -m bench.dataset peer --json        500 rows behind an instruction of 300 tokens, wall time of both
    python -m bench.dataset memory --json      short rows through an engine that echoes: 100,000 and 1,000,000

Both sides of `peer` are processes that import, load, read the rows, and write what came back. They run in
turns; the first turn of each is not counted, since vLLM compiles then.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench import children, workloads
from jobs.dataset import making
from worker.engine import smollm2

_SCRIPT = Path(__file__).parent / "peers" / "vllm_script.py"
_MAX_TOKENS = 48
_MOST_RATIO = 1.2
"""Memory at a million rows, of that at a tenth."""


@click.group()
def main() -> None:
    """Measure `longhaul generate`."""


@main.command()
@click.option("--rows", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--instruction-tokens", type=click.IntRange(min=0), default=300, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("as_json", "--json", is_flag=True)
def peer(rows: int, instruction_tokens: int, repeats: int, seed: int, threads: int, as_json: bool) -> None:
    """Compare the wall time with that of a script around vLLM (make bench-peers ARGS=vllm)."""
    model = smollm2.ensure()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        source, system = _rows(model, rows, instruction_tokens, seed, directory)
        # The text is no template.
        commands = {
            "longhaul": [
                *(
                    sys.executable,
                    "-m",
                    "jobs.cli",
                    "generate",
                    str(source),
                    "-o",
                    "{out}",
                    "--model",
                    str(model),
                ),
                *(
                    "--system",
                    f"{{% raw %}}{system}{{% endraw %}}",
                    "--prompt",
                    "{{ text }}",
                    "--temperature",
                    "0",
                ),
                *("--max-tokens", str(_MAX_TOKENS), "--format", "jsonl"),
            ],
            "vllm": [
                str(children.VENVS / "vllm" / "bin" / "python"),
                # -P: the script's own folder has a vllm.py.
                *("-P", str(_SCRIPT), str(model), str(source), "{out}", system, str(_MAX_TOKENS)),
            ],
        }
        seconds, texts = _in_turns(commands, repeats, directory, threads)
    same = sum(one == other for one, other in zip(texts["longhaul"], texts["vllm"], strict=True))
    _tell(
        as_json,
        {
            "figure": "dataset_peer",
            "rows": rows,
            "instruction_tokens": instruction_tokens,
            "max_tokens": _MAX_TOKENS,
            "seed": seed,
            "longhaul_seconds": seconds["longhaul"],
            "vllm_seconds": seconds["vllm"],
            "ratio": round(statistics.median(seconds["longhaul"]) / statistics.median(seconds["vllm"]), 3),
            "equal_outputs": same,
        },
    )


@main.command()
@click.option("rows", "--rows", type=click.IntRange(min=1), multiple=True, default=(100_000, 1_000_000))
@click.option("as_json", "--json", is_flag=True)
def memory(rows: Sequence[int], as_json: bool) -> None:
    """Measure peak memory and rows per second with an engine that echoes."""
    model = smollm2.ensure()
    peaks = []
    for count in rows:
        with tempfile.TemporaryDirectory() as place:
            source = _short_rows(count, Path(place))
            out = Path(place) / "out"
            command = [
                *(
                    sys.executable,
                    "-m",
                    "jobs.cli",
                    "generate",
                    str(source),
                    "-o",
                    str(out),
                    "--model",
                    str(model),
                ),
                *(
                    "--engine",
                    "echo",
                    "--prompt",
                    "{{ text }}",
                    "--max-tokens",
                    "8",
                    "--raw",
                    "--temperature",
                    "0",
                ),
            ]
            seconds, peak = _timed(command, Path(place) / "log", os.cpu_count() or 1)
            peaks.append(peak)
            figures = {"rows": count, "seconds": round(seconds, 1), "rows_per_second": round(count / seconds)}
            _tell(as_json, {"figure": "dataset_memory", **figures, "peak_mb": round(peak / 1e6)})
    if len(peaks) > 1:
        _tell(
            as_json,
            {"figure": "dataset_memory_ratio", "ratio": round(peaks[-1] / peaks[0], 3), "most": _MOST_RATIO},
        )


def _rows(model: Path, count: int, tokens: int, seed: int, directory: Path) -> tuple[Path, str]:
    """Write rows of 16 to 64 tokens of real text; return them and an instruction of so many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    cut = workloads.cutter(workloads.text_ids(tokenizer), random.Random(seed))
    drawn = random.Random(seed + 1)
    system = tokenizer.decode(cut(tokens)) if tokens else "Go on."
    path = directory / "rows.jsonl"
    with path.open("w") as stream:
        for number in range(count):
            text = tokenizer.decode(cut(drawn.randint(16, 64)))
            stream.write(json.dumps({"id": number, "text": text}) + "\n")
    return path, system


def _short_rows(count: int, directory: Path) -> Path:
    path = directory / "rows.jsonl"
    with path.open("w") as stream:
        for number in range(count):
            stream.write(f'{{"id": {number}, "text": "row {number} is a short one"}}\n')
    return path


def _in_turns(
    commands: dict[str, list[str]], repeats: int, directory: Path, threads: int
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    texts: dict[str, list[str]] = {}
    for turn in range(repeats + 1):
        for name, command in commands.items():
            out = directory / name
            for left in (out, making.working_directory(out)):  # else the second run would have nothing to do
                shutil.rmtree(left, ignore_errors=True)
            took, _ = _timed(
                [part.format(out=out) if part == "{out}" else part for part in command],
                directory / "log",
                threads,
            )
            texts[name] = _outputs(out)
            click.echo(f"{name}: {took:.1f} s{' (not counted)' if turn == 0 else ''}", err=True)
            if turn:
                seconds[name].append(round(took, 2))
    return seconds, texts


def _timed(command: list[str], log: Path, threads: int) -> tuple[float, int]:
    """Run a command; return its seconds and the most memory (bytes) that one of its processes had."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(children.ROOT)}
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise click.ClickException(f"{command[:4]} failed:\n{log.read_text()[-2000:]}")
    return time.monotonic() - began, usage.ru_maxrss * 1024


def _outputs(out: Path) -> list[str]:
    lines = (out / "data-00000.jsonl").read_text().splitlines()
    return [json.loads(line)["output"] for line in lines]


def _tell(as_json: bool, figures: dict[str, Any]) -> None:
    click.echo(
        json.dumps(figures) if as_json else "  ".join(f"{name} {value}" for name, value in figures.items())
    )


if __name__ == "__main__":
    main()
