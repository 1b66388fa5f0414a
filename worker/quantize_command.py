"""The command `longhaul quantize`: a model's directory with weights of 4 or 8 bits."""

import sys
from pathlib import Path
from typing import Any

import click

from jobs import errors, places, tokens
from jobs.settings import Settings


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="A directory that is not there yet.",
)
@click.option("--bits", type=click.Choice(["4", "8"]), default="4", show_default=True)
@click.option(
    "--group",
    type=click.Choice(["32", "64", "128"]),
    default="64",
    show_default=True,
    help="Weights in a row that share a scale: fewer are more exact and take more memory.",
)
@click.option(
    "--calibrate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="TEXT",
    help="A file of text like what the model is for, of 20,000 words or so.",
)
@click.option("--rtn", is_flag=True, help="Round to the nearest: quick, and worse.")
@click.option("--revision", help="Hub revision.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model's own Python code.")
@click.option("--device", help="auto, cpu, cuda, cuda:0, ...")
def quantize(
    model: str,
    output: Path,
    bits: str,
    group: str,
    calibrate: Path | None,
    rtn: bool,
    revision: str | None,
    trust_remote_code: bool,
    device: str | None,
) -> None:
    """Write MODEL (a hub id or a directory) with weights of 4 or 8 bits to a directory of its own.

    It loads like any model, in a fraction of the memory: give DIR wherever a model is named. Scales are
    chosen by what goes into each layer while the model runs over that text, or without --calibrate over
    tokens of its own; with a text, errors of rounding are made up for, too. Embeddings and the head stay as
    they are. Only one full weight is in memory at a time.

    \b
    longhaul quantize HuggingFaceTB/SmolLM2-135M-Instruct -o smol-int4
    longhaul quantize ./qwen3-4b -o qwen3-4b-int4 --group 32 --calibrate prompts.txt
    longhaul run prompts.jsonl -o out.jsonl --model ./smol-int4
    """
    if rtn and calibrate:
        raise click.UsageError("--rtn has no use for a text to calibrate by.")
    places.check(output)
    settings = Settings.load(**({} if device is None else {"device": device}))
    tokens.import_transformers()
    from worker.engine import EngineConfig
    from worker.engine.quantize import writing
    from worker.engine.quantize.recipe import Recipe

    method: Any = "rtn" if rtn else "calibrated" if calibrate else "sampled"
    recipe = Recipe(4 if bits == "4" else 8, int(group), method)
    config = EngineConfig(settings.device, revision=revision, trust_remote_code=trust_remote_code)
    with click.progressbar(length=1, label="Quantising", file=sys.stderr) as bar:

        def progress(done: int, of: int) -> None:
            bar.length = of
            bar.update(done - bar.pos)

        writing.write(model, output, recipe, _text(calibrate), config, progress)
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    click.echo(f"{output}: {bits} bits in groups of {group}, {size / 1e6:,.0f} MB of weights")


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise errors.LonghaulError(f"{path} is not UTF-8 text.") from None
