"""The options of `longhaul generate`, in the order in which --help tells them."""

from pathlib import Path
from typing import Any

import click

FORMATS = ("parquet", "jsonl", "messages", "sharegpt")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PROMPT = [
    click.option(
        "--prompt", metavar="TEXT", help="The user's message: a Jinja2 template over the columns of a row."
    ),
    click.option("template", "--template", type=_FILE, help="The same from a file."),
    click.option("--system", metavar="TEXT", help="The system message, a template too."),
    click.option(
        "chat",
        "--chat",
        type=_FILE,
        help="YAML: a list of messages (role, content), as for few-shot prompts.",
    ),
    click.option("pipeline", "--pipeline", type=_FILE, help="YAML: several steps (docs/datasets.md)."),
    click.option(
        "--raw", is_flag=True, help="Complete the prompt as it is, without the model's chat template."
    ),
]
_ROWS = [
    click.option("--columns", metavar="A,B", help="Columns of the input to keep.  [default: all]"),
    click.option("--where", metavar="SQL", help='Take the rows for which this is true: "len(text) < 2000".'),
    click.option("--limit", type=click.IntRange(min=1), help="Take the first N of these rows."),
    click.option(
        "--reorder", is_flag=True, help="Run rows with equal beginnings together; outputs keep their order."
    ),
]
_MODEL = [
    click.option(
        "--model", required=True, help="Hub id, directory or GGUF file; with --submit the name served there."
    ),
    click.option(
        "--samples", type=click.IntRange(1, 1000), default=1, show_default=True, help="Outputs for each row."
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
    click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of an output."),
    click.option(
        "--temperature", type=click.FloatRange(0, 2), help="0 takes the likeliest tokens.  [default: 1]"
    ),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True)),
    click.option("--top-k", type=click.IntRange(min=-1)),
    click.option("--min-p", type=click.FloatRange(0, 1)),
    click.option("--stop", multiple=True, metavar="TEXT", help="End an output before this. Up to four."),
    click.option("--max-running", type=click.IntRange(min=1), help="Most requests in the running batch."),
    click.option("--device", help="auto, cpu, cuda, cuda:0, ..."),
]
_SCHEMA = [
    click.option(
        "schema", "--schema", metavar="FILE|MODULE:MODEL", help="JSON schema or pydantic model of an output."
    ),
    click.option(
        "--retries", type=click.IntRange(0, 100), default=0, help="Try so often again what is not valid."
    ),
    click.option("--keep-invalid", is_flag=True, help="Keep outputs that are not valid, with `valid` false."),
]
_QUALITY = [
    click.option("--min-chars", type=click.IntRange(min=0), help="Leave out shorter outputs."),
    click.option("--max-chars", type=click.IntRange(min=0), help="Leave out longer outputs."),
    click.option("--match", metavar="REGEX", help="Keep outputs in which this is found."),
    click.option("--reject", metavar="REGEX", help="Leave out outputs in which this is found."),
    click.option(
        "--dedupe", metavar="exact|near|SHARE", help="Leave out equal outputs, or near ones.  [near: 0.8]"
    ),
    click.option(
        "--judge", metavar="TEXT", help="Prompt for a score of 1 to 10; with --samples the best is kept."
    ),
    click.option("--judge-least", type=float, metavar="SCORE", help="Leave out what the judge gives less."),
    click.option(
        "on",
        "--on",
        metavar="COLUMN",
        default="output",
        show_default=True,
        help="Which column these look at.",
    ),
]
_REMOTE = [
    click.option("--submit", metavar="URL", help="Have a Longhaul elsewhere compute it."),
    click.option("--api-key", envvar="LONGHAUL_API_KEY", metavar="KEY"),
    click.option(
        "--job-rows",
        type=click.IntRange(1, 50_000),
        default=50_000,
        show_default=True,
        help="Requests a job.",
    ),
]
_OUTPUT = [
    click.option(
        "-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR"
    ),
    click.option("format", "--format", type=click.Choice(FORMATS), default="parquet", show_default=True),
    click.option("--overwrite", is_flag=True, help="Take another recipe than the one that DIR was made by."),
    click.option(
        "--cache", type=click.Path(file_okay=False, path_type=Path), help="Keep outputs for other runs, too."
    ),
    click.option(
        "--preview", type=click.IntRange(min=1), metavar="N", help="Print the outputs of N rows and stop."
    ),
    click.option(
        "--cost-per-hour", type=click.FloatRange(min=0), help="What a worker costs, for the report."
    ),
    click.option("as_json", "--json", is_flag=True, help="Print the summary (or the preview) as JSON."),
    click.option("engine", "--engine", type=click.Choice(["auto", "echo"]), default="auto", hidden=True),
]


def all_of_them(command: Any) -> Any:
    """Give a command all options."""
    for option in reversed(_OUTPUT + _PROMPT + _ROWS + _MODEL + _SCHEMA + _QUALITY + _REMOTE):
        command = option(command)
    return command
