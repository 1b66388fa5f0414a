"""The command `longhaul run`: a file through a model in one process, without servers."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import click
import orjson

from jobs import errors, listing, places, plan, progress
from jobs.model_settings import ModelSettings
from jobs.records import Manifest
from jobs.settings import Settings
from worker.offline_job import OfflineJob, forget, working_directory

ENGINES = get_args(ModelSettings.model_fields["engine"].annotation)


@click.command()
@click.argument("source", metavar="IN", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--model", required=True, help="Hub id, local directory or GGUF file; or a name in LONGHAUL_MODELS."
)
@click.option("--served-name", help="The model name that the lines use.  [default: that of the first line]")
@click.option(
    "chat_template",
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A Jinja file to render chats with instead of the model's own template.",
)
@click.option("--max-running", type=click.IntRange(min=1), help="Most requests in the running batch.")
@click.option("--device", help="auto, cpu, cuda, cuda:0, ...")
@click.option("--overwrite", is_flag=True, help="Forget an earlier run into the same output.")
@click.option("as_json", "--json", is_flag=True, help="Print the summary as JSON.")
@click.option("engine_name", "--engine", type=click.Choice(ENGINES), default="auto", hidden=True)
@click.option("faults", "--fault", multiple=True, hidden=True, help="What the echo engine does wrong.")
def run(
    source: Path,
    output: Path,
    model: str,
    served_name: str | None,
    chat_template: Path | None,
    max_running: int | None,
    device: str | None,
    overwrite: bool,
    as_json: bool,
    engine_name: str,
    faults: tuple[str, ...],
) -> None:
    """Run the requests in IN through a model in this process, and write the results to OUT.

    IN has one request a line, in the OpenAI Batch form. Results come in input order; failed requests go to
    OUT.errors.jsonl, latencies to OUT.metrics.jsonl, totals to OUT.summary.json (OUT without its suffix).
    The same command again goes on where Ctrl-C or a crash stopped it; when all is done it only reports.

    \b
    longhaul run prompts.jsonl -o out.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct
    longhaul run prompts.jsonl -o out.jsonl --model ./llama-3.gguf --max-running 16

    \b
    Exit codes: 0 all requests succeeded, 3 some failed, 4 the input is wrong, 70 the engine hung,
    130 interrupted (both resumable).
    """
    _refuse_own_input(source, output)
    places.check(output)
    changed = {"max_running": max_running, "device": device}
    settings = Settings.load(**{name: value for name, value in changed.items() if value is not None})
    served = settings.models.get(model) or ModelSettings(source=model, engine=engine_name, faults=faults)
    if chat_template is not None:
        served = served.model_copy(update={"chat_template": str(chat_template.resolve())})
    option = f"LONGHAUL_MODELS, {model}: " if model in settings.models else "--model "
    try:
        with _alone(working_directory(output), overwrite):
            manifest = _tidily(source, output, served, served_name, settings, option)
    except plan.InvalidInput as invalid:
        for found in invalid.errors[: progress.MOST_FAULTS]:
            click.echo(f"longhaul: {source}: {listing.fault(found)}", err=True)
        if len(invalid.errors) > progress.MOST_FAULTS:
            click.echo(f"longhaul: {source}: and {len(invalid.errors) - progress.MOST_FAULTS} more", err=True)
        raise SystemExit(4) from None
    except KeyboardInterrupt:
        click.echo("longhaul: interrupted; the same command goes on from here.", err=True)
        raise SystemExit(130) from None
    except OSError as error:
        raise errors.LonghaulError(f"{error.filename or output}: {error.strerror or error}.") from error
    if as_json:
        click.echo(orjson.dumps(_summary(output)))
    else:
        _report(output, manifest)
    raise SystemExit(3 if manifest.failed else 0)


def _tidily(
    source: Path,
    output: Path,
    served: ModelSettings,
    served_name: str | None,
    settings: Settings,
    option: str,
) -> Manifest:
    """Run the job. One that fails before any request ran leaves no working directory, unless it found one."""
    directory, job = working_directory(output), None
    found = directory.exists()
    try:
        job = OfflineJob(source, output, served, served_name, settings, option=option)
        return job.run(progress.view(as_json=False))
    except (errors.LonghaulError, OSError) as error:
        if not found and (job is None or not job.began):
            forget(directory)
        if isinstance(error, errors.StoreUnreachable):
            advice = "Make room, or give another -o; the same command goes on from here."
            raise errors.LonghaulError(f"{directory}: {error.values['reason']}. {advice}") from error
        raise


def _report(output: Path, manifest: Manifest) -> None:
    rate = _summary(output)["tokens_per_second"]
    click.echo(
        f"{manifest.completed} completed, {manifest.failed} failed of {manifest.total}; "
        f"{manifest.usage[0]:,} input and {manifest.usage[2]:,} output tokens"
        + (f", {rate:,.1f} output tokens/s" if rate else "")
    )
    for path in places.of_job(output).values():
        if path.exists():
            click.echo(f"  {path}")


def _summary(output: Path) -> dict[str, Any]:
    return dict(orjson.loads(places.of_job(output)["summary"].read_bytes()))


def _refuse_own_input(source: Path, output: Path) -> None:
    for written in places.of_job(output).values():
        if os.path.realpath(written) == os.path.realpath(source):
            raise click.UsageError(f"The run would write over its own input {source}. Give another -o.")
        if written.exists() and not written.is_file():  # it would be replaced: root can do that to /dev/null
            raise click.UsageError(f"{written} is no file. Give another -o.")


@contextmanager
def _alone(directory: Path, overwrite: bool) -> Iterator[None]:
    """Hold the working directory for this process; a second run into the same output is refused."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = directory.with_name(directory.name + ".lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _another(directory) from None
        # Who ends takes the lock away: one that was opened before that locks nothing any more.
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(lock.fileno())):
            raise _another(directory)
        try:
            if overwrite:
                forget(directory)
            yield
        finally:
            path.unlink(missing_ok=True)


def _another(directory: Path) -> errors.Conflict:
    return errors.Conflict(f"Another run is writing to {directory}. Let it end, or give another -o.")
