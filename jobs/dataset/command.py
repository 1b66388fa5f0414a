"""The command `longhaul generate`. What it needs of Arrow and the rest is imported when it runs."""

import sys
from typing import TYPE_CHECKING, Any

import click
import orjson

from jobs import errors, places
from jobs.dataset import command_options

if TYPE_CHECKING:
    from jobs.dataset import calling, steps
    from jobs.dataset import making as makings

_FILTERS = ("min_chars", "max_chars", "match", "reject")
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
_OF_A_STEP = {
    *("prompt", "template", "system", "chat", "raw", "samples", "seed", "schema", "retries", "keep_invalid"),
    *("dedupe", "judge", "judge_least", "on", *_FILTERS, *_PARAMETERS),
}
_EXCLUSIVE = (
    *(("prompt", "template"), ("prompt", "chat"), ("template", "chat"), ("system", "chat")),
    *(("raw", "system"), ("raw", "schema"), ("submit", "device"), ("submit", "max_running")),
)
_NEEDS = {
    "judge_least": ("judge",),
    "retries": ("schema",),
    "keep_invalid": ("schema",),
    "on": ("dedupe", *_FILTERS),
}


class _Command(click.Command):
    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        try:
            return super().parse_args(context, arguments)
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            advice = "A glob, a prompt, an expression: each stands in quotes."
            raise click.UsageError(f"{error.message}. {advice}", context) from None


@click.command(cls=_Command, short_help="Make a dataset: what a model says to each row.")
@click.argument("source", metavar="INPUT")
@command_options.all_of_them
def generate(**given: Any) -> None:
    """Make a dataset out of a dataset: a prompt for each row of INPUT, and what a model answers to it.

    INPUT is a file of Parquet, CSV or JSON lines (also compressed), a directory or glob of them, s3://bucket/...,
    or a datasets directory. DIR gets the rows with their outputs as Parquet shards, in input order, a dataset
    card, and errors.parquet for rows that failed. The same command again goes on where Ctrl-C or a crash
    stopped it, and runs only rows that are new or changed.

    \b
    longhaul generate data.parquet -o out/ --model org/model --prompt 'For a child: {{ text }}'
    longhaul generate data.csv -o out/ --model org/model --template ask.jinja --preview 5
    longhaul generate 'logs/*.jsonl.gz' -o out/ --model org/model --schema tags.json \\
        --prompt 'Classify: {{ line }}' --where "len(line) < 2000" --temperature 0
    longhaul generate tasks.jsonl -o out/ --model org/model --prompt '{{ task }}' --samples 4 \\
        --judge 'Rate this answer to "{{ task }}" from 1 to 10: {{ output }}' --dedupe near
    longhaul generate data.parquet -o out/ --model served-name --prompt '{{ text }}' \\
        --submit http://host:8000

    \b
    Exit codes: 0 every row has its output, 3 some failed or are not valid, 1 an error that the
    message names, 2 wrong usage, 130 interrupted (the same command goes on).
    """
    from jobs.dataset import calling, publishing, report

    as_json, preview = given["as_json"], given["preview"]
    shown = report.view()
    try:
        asked = _asked(given)
        places.check(asked.output)
        with calling.opened(asked, shown) as making:
            if not preview:
                making.check_recipes()
            _tell_before(making, asked)
            if preview:
                with shown:
                    rows = list(making.preview(preview))
                _print_rows(rows, making.made, as_json)
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

    _check(given)
    if given["pipeline"]:
        return steps.read(given["pipeline"])
    made: list[dict[str, Any]] = [{"generate": _generate(given)}]
    filters = {name: given[name] for name in _FILTERS if given[name] is not None}
    if filters:
        made.append({"filter": {"column": given["on"]} | filters})
    if given["judge"]:
        judge = {"prompt": given["judge"], "best": given["samples"] > 1, "least": given["judge_least"]}
        made.append({"judge": judge | {"seed": given["seed"]}})
    if given["dedupe"]:
        made.append({"dedupe": {"column": given["on"], "near": _near(given["dedupe"])}})
    return steps.pipeline(made, "The options")


def _check(given: dict[str, Any]) -> None:
    """Refuse options that do not go together, or of which one would do nothing."""
    said = _said()
    for name in sorted(said & _OF_A_STEP) if "pipeline" in said else ():
        raise click.UsageError(f"{_option(name)} and --pipeline: write it into the pipeline's steps.")
    for name, needed in _NEEDS.items():
        if name in said and not said & set(needed):
            raise click.UsageError(f"{_option(name)} needs {' or '.join(map(_option, needed))}.")
    for one, other in _EXCLUSIVE:
        if {one, other} <= said:
            raise click.UsageError(f"{_option(one)} and {_option(other)} do not go together.")
    if not said & {"prompt", "template", "chat", "pipeline"} or given["prompt"] == "":
        raise click.UsageError(
            "Give a prompt: --prompt TEXT, --template FILE, --chat FILE or --pipeline FILE."
        )


def _said() -> set[str]:
    """Return the options that the command line has."""
    context = click.get_current_context()
    line = click.core.ParameterSource.COMMANDLINE
    return {name for name in context.params if context.get_parameter_source(name) is line}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _generate(given: dict[str, Any]) -> dict[str, Any]:
    names = ("raw", "samples", "seed", "schema", "retries", "keep_invalid")
    return {name: given[name] for name in names} | _parameters(given) | _messages(given)


def _messages(given: dict[str, Any]) -> dict[str, Any]:
    from jobs.dataset import steps

    if given["chat"]:
        return {"messages": steps.read_messages(given["chat"])}
    prompt = given["prompt"] if given["prompt"] is not None else given["template"].read_text("utf-8")
    return {"prompt": prompt, "system": given["system"]}


def _parameters(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _PARAMETERS if given[name] not in (None, ())}


def _near(text: str) -> float | None:
    from jobs.dataset import steps

    if text in ("exact", "near"):
        return None if text == "exact" else steps.NEAR
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


def _print_rows(rows: list[dict[str, Any]], made: "makings.Made", as_json: bool) -> None:
    for row in rows:
        if as_json:
            click.echo(orjson.dumps(row, default=str))
            continue
        for name, value in row.items():
            text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
            click.echo(f"{name}: {text}")
        click.echo()
    if made.failed or made.invalid:
        click.echo(f"{made.failed} failed, {made.invalid} not valid", err=True)
