"""The command `longhaul generate`. What it needs of Arrow and the rest is imported when it runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from jobs import errors

if TYPE_CHECKING:
    from jobs.dataset import calling, steps
    from jobs.dataset import making as makings

FORMATS = ("parquet", "jsonl", "messages", "sharegpt")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_PROMPTS = ("prompt", "template", "system", "chat", "raw")
_NEAR = 0.8

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


def _all(options: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command()
@click.argument("source", metavar="INPUT")
@_all(_OUTPUT + _PROMPT + _ROWS + _MODEL + _SCHEMA + _QUALITY + _REMOTE)
def generate(**given: Any) -> None:
    """Make a dataset out of a dataset: a prompt for each row of INPUT, and what a model answers to it.

    INPUT is a file of Parquet, CSV or JSON lines (also compressed), a directory or glob of them, s3://bucket/...,
    or a datasets directory. DIR gets the rows with their outputs as Parquet shards, in input order, a dataset
    card, and errors.parquet for rows that failed. The same command again goes on where Ctrl-C or a crash
    stopped it, and runs only rows that are new or changed.

    \b
    longhaul generate data.parquet -o out/ --model org/model --prompt 'Rewrite for a child: {{ text }}'
    longhaul generate data.csv -o out/ --model org/model --template ask.jinja --preview 5
    longhaul generate 'logs/*.jsonl.gz' -o out/ --model org/model --schema tags.json \\
        --prompt 'Classify: {{ line }}' --where "len(line) < 2000" --temperature 0
    longhaul generate tasks.jsonl -o out/ --model org/model --prompt '{{ task }}' --samples 4 --dedupe near \\
        --judge 'Rate this answer to "{{ task }}" from 1 to 10: {{ output }}'
    longhaul generate data.parquet -o out/ --model served-name --prompt '{{ text }}' --submit http://host:8000

    \b
    Exit codes: 0 every row has its output, 3 some failed or are not valid, 1 an error that the message names,
    130 interrupted (the same command goes on).
    """
    from jobs.dataset import calling, publishing, report

    as_json, preview = given["as_json"], given["preview"]
    shown = report.view()
    try:
        asked = _asked(given)
        with calling.opened(asked, shown) as making:
            _tell_before(making, asked)
            if preview:
                _preview(making, preview, as_json)
                return
            with shown:
                made = making.write()
            summary = publishing.publish(making, asked)
    except KeyboardInterrupt:
        click.echo("longhaul: interrupted; the same command goes on from here.", err=True)
        raise SystemExit(130) from None
    except OSError as error:
        place = error.filename or given["output"]
        raise errors.LonghaulError(f"{place}: {error.strerror or error}.") from error
    if as_json:
        click.echo(orjson.dumps(summary))
    else:
        click.echo("\n".join(publishing.lines(summary)))
    raise SystemExit(3 if made.failed or made.invalid else 0)


def _asked(given: dict[str, Any]) -> "calling.Asked":
    from jobs.dataset import calling, making

    options = making.Options(
        format=given["format"],
        reorder=given["reorder"],
        overwrite=given["overwrite"],
        cache=given["cache"],
        job_requests=given["job_rows"],
        cost_per_hour=given["cost_per_hour"],
    )
    said = {name: given[name] for name in ("max_running", "device") if given[name] is not None}
    return calling.Asked(
        place=given["source"],
        output=given["output"],
        model=given["model"],
        pipeline=_pipeline(given),
        columns=[name.strip() for name in given["columns"].split(",")] if given["columns"] else None,
        where=given["where"],
        limit=given["limit"],
        options=options,
        submit=given["submit"],
        api_key=given["api_key"],
        settings=said,
        model_settings={} if given["engine"] == "auto" else {"engine": given["engine"]},
        command=("longhaul", *sys.argv[1:]),
    )


def _pipeline(given: dict[str, Any]) -> "steps.Pipeline":
    """Return the steps that the options name: generate, filter, judge, dedupe."""
    from jobs.dataset import steps

    if given["pipeline"]:
        for name in (*_PROMPTS, "schema", "judge", "dedupe"):
            if given[name]:
                raise click.UsageError(f"--{name} and --pipeline: write it into the pipeline's steps.")
        return steps.read(given["pipeline"])
    parameters = _parameters(given)
    made: list[dict[str, Any]] = [{"generate": _generate(given, parameters)}]
    asked = {
        name: given[name] for name in ("min_chars", "max_chars", "match", "reject") if given[name] is not None
    }
    if asked:
        made.append({"filter": {"column": given["on"]} | asked})
    if given["judge"]:
        judge = {"prompt": given["judge"], "best": given["samples"] > 1, "least": given["judge_least"]}
        made.append({"judge": judge | {"seed": given["seed"]}})
    elif given["judge_least"] is not None:
        raise click.UsageError("--judge-least needs --judge.")
    if given["dedupe"]:
        made.append({"dedupe": {"column": given["on"], "near": _near(given["dedupe"])}})
    return steps.pipeline(made, "The options")


def _generate(given: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    named = [name for name in _PROMPTS if given[name]]
    if not {"prompt", "template", "chat"} & set(named):
        raise click.UsageError(
            "Give a prompt: --prompt TEXT, --template FILE, --chat FILE.yaml or --pipeline FILE."
        )
    if len({"prompt", "template", "chat"} & set(named)) > 1 or {"chat", "system"} <= set(named):
        raise click.UsageError(f"--{' and --'.join(named)}: one of them is enough.")
    if given["raw"] and given["system"]:
        raise click.UsageError("--raw completes one text: it takes no --system.")
    names = ("raw", "samples", "seed", "schema", "retries", "keep_invalid")
    return {name: given[name] for name in names} | parameters | _messages(given)


def _messages(given: dict[str, Any]) -> dict[str, Any]:
    from jobs.dataset import steps

    if given["chat"]:
        return {"messages": steps.read_messages(given["chat"])}
    prompt = given["prompt"] if given["prompt"] is not None else given["template"].read_text("utf-8")
    return {"prompt": prompt, "system": given["system"]}


def _parameters(given: dict[str, Any]) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
    return {name: given[name] for name in names if given[name] not in (None, ())}


def _near(text: str) -> float | None:
    if text in ("exact", "near"):
        return None if text == "exact" else _NEAR
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"--dedupe {text}: it is exact, near, or a share such as 0.8.") from None


def _tell_before(making: "makings.Making", asked: "calling.Asked") -> None:
    """Say on standard error what is about to be done."""
    from jobs.dataset import making as makings

    making.look()
    if making.survey is not None:
        samples = making.prepared.models[0].samples
        click.echo("\n".join(making.survey.lines(makings.counted(making.source), samples)), err=True)


def _preview(making: "makings.Making", rows: int, as_json: bool) -> None:
    for row in making.preview(rows):
        if as_json:
            click.echo(orjson.dumps(row, default=str))
            continue
        for name, value in row.items():
            text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
            click.echo(f"{name}: {text}")
        click.echo()
    made = making.made
    if made.failed or made.invalid:
        click.echo(f"{made.failed} failed, {made.invalid} not valid", err=True)
