"""The command `longhaul size`: what a model and its KV would take of a GPU's memory, without either."""

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from jobs import errors, tokens
from jobs.model_settings import ModelSettings
from jobs.settings import Settings

if TYPE_CHECKING:
    from worker.engine.footprint import Footprint

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _size(written: str) -> int:
    """Return the bytes of a number with a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT]i?B)", written.strip())
    if found is None or not 0 < float(found[1]) < 1e15:
        raise click.BadParameter(f"{written!r} is not a size such as 24GB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--memory",
    type=_size,
    metavar="SIZE",
    multiple=True,
    required=True,
    help="Of a card, such as 24GB; several.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Of the weights.  [default: the model's own half precision, else bfloat16]",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Tokens of a request, prompt and output, for the requests at once.",
)
@click.option(
    "--host-memory", type=_size, metavar="SIZE", help="Of the host, for KV that the card has no room for."
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Cards that share the model; the figures are one card's.",
)
@click.option("--max-running", type=click.IntRange(min=1), help="Most requests in the running batch.")
@click.option("as_json", "--json", is_flag=True, help="Print one JSON object a card.")
def size(
    model: str,
    memory: tuple[int, ...],
    dtype: str | None,
    context: int,
    host_memory: int | None,
    tensor_parallel: int,
    max_running: int | None,
    as_json: bool,
) -> None:
    """Plan the memory of GPUs for MODEL: a hub id, a directory with a config.json, or that file, a GGUF file,
    or a name of LONGHAUL_MODELS. LONGHAUL_QUANTIZE counts.

    No weights are read and no GPU is needed: the model's own code runs without numbers. GB are 10^9 bytes,
    of which cards have a few more than their names say.

    \b
    longhaul size Qwen/Qwen3-4B --memory 24GB --memory 80GB
    longhaul size ./config.json --memory 24GB --context 32768 --host-memory 64GB
    """
    changed = {} if max_running is None else {"max_running": max_running}
    settings = Settings.load(**changed)
    need = footprint_of(model, settings, dtype, tensor_parallel)
    if context > need.context_tokens:
        raise errors.LonghaulError(
            f"--context {context:,} is more than the model has, which is {need.context_tokens:,}."
        )
    rows = [_planned(need, card, context, settings, host_memory or 0) for card in memory]
    if not any(isinstance(row, dict) for row in rows):
        raise errors.LonghaulError(
            "\n".join(f"{_card(card)}: {row}" for card, row in zip(memory, rows, strict=True))
        )
    if as_json:
        for card, row in zip(memory, rows, strict=True):
            found = row if isinstance(row, dict) else {"memory": card, "error": row}
            click.echo(orjson.dumps({"model": model} | found))
    else:
        click.echo(_text(need, memory, rows, context, settings.max_running))


def footprint_of(model: str, settings: Settings, dtype: str | None, parallel: int) -> "Footprint":
    """Return what a model needs, by its config; raises errors.ModelUnavailable.

    Everything that takes long to import is imported here.
    """
    tokens.import_transformers()
    import torch

    from worker.engine import EngineConfig, footprint

    path = Path(os.path.expanduser(model))
    source = str(path.resolve().parent) if path.name == "config.json" and path.is_file() else model
    served = settings.models.get(model) or ModelSettings(source=source)
    weights = settings.completed(served)
    config = EngineConfig(
        max_running=settings.max_running,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        context_tokens=served.context_tokens,
        revision=served.revision,
        trust_remote_code=served.trust_remote_code,
        quantize=None if weights.quantize == "none" else weights.quantize,
        quantize_group=weights.quantize_group or settings.quantize_group,
        quantize_method=weights.quantize_method or settings.quantize_method,
        quantize_head=weights.quantize_head or settings.quantize_head,
    )
    return footprint.of_source(served.source, config, getattr(torch, dtype) if dtype else None, parallel)


def _planned(
    need: "Footprint", memory: int, context: int, settings: Settings, host_memory: int
) -> dict[str, Any] | str:
    """Return the plan of a card, or why there is none."""
    from worker.engine import sizing

    try:
        plan = sizing.plan(need, memory, context, settings.max_running, host_memory, settings.kv_memory_bytes)
    except sizing.DoesNotFit as error:
        return str(error)
    return dataclasses.asdict(plan) | {"tokens": plan.tokens}


_COLUMNS = (
    ("card", "memory"),
    ("weights", "weight_bytes"),
    ("step", "step_bytes"),
    ("graphs", "graph_bytes"),
    ("other", "other_bytes"),
    ("KV", "kv_bytes"),
    ("pages", "pages"),
    ("tokens", "tokens"),
    ("requests", "requests"),
    ("longest", "longest"),
    ("with host", "longest_with_host"),
)


def _text(
    need: "Footprint", memory: tuple[int, ...], rows: list[dict[str, Any] | str], context: int, running: int
) -> str:
    """Return what a person reads: the model, a Markdown table of the cards, and what does not fit."""
    some = next(row for row in rows if isinstance(row, dict))
    dtype = str(need.dtype).removeprefix("torch.") + (
        f" with {need.quantized} weights" if need.quantized else ""
    )
    cards = f", one of {need.tensor_parallel} cards" if need.tensor_parallel > 1 else ""
    lines = [
        f"{need.name}, {dtype}{cards}: {need.parameters / 1e9:.2f} billion"
        f" parameters; KV {need.token_bytes:,} bytes a token, {some['page_bytes'] / 1e6:.1f} MB a page;"
        f" host pages {some['host_pages']:,}.",
        f"Decode graphs for {running} running: {', '.join(map(str, some['graph_sizes']))}.",
        f"Memory in GB; requests of {context:,} tokens at once; longest request in tokens.",
        "",
        "| " + " | ".join(title for title, _ in _COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
        *("| " + " | ".join(_cells(row)) + " |" for row in rows if isinstance(row, dict)),
    ]
    lines += [f"{_card(card)}: {row}" for card, row in zip(memory, rows, strict=True) if isinstance(row, str)]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        _gb(row[name]) if name == "memory" or name.endswith("_bytes") else f"{row[name]:,}"
        for _, name in _COLUMNS
    ]


def _card(memory: int) -> str:
    return f"{_gb(memory)} GB" if memory >= 10**8 else f"{memory / 1e6:g} MB"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}".rstrip("0").rstrip(".")
