"""The `longhaul` command: its group, how errors become exit codes, and commands that other packages add."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs import (
    autoscale_command,
    client,
    commands,
    completion,
    doctor,
    errors,
    key_commands,
    log,
    named_store,
    queue_commands,
    report_command,
    retention_commands,
    servers,
    settings,
    top,
    values,
)
from jobs.dataset import command as dataset_command

if TYPE_CHECKING:
    from jobs import stack

PLUGINS = "longhaul.commands"
# What --help says of a plugin, so that listing the commands imports none of them.
_PLUGIN_HELP = {
    "quantize": "Write a model with weights of 4 or 8 bits.",
    "run": "Run a file through a model in this process; no servers.",
    "size": "Plan a GPU's memory for a model, without either.",
}


class MissingExtra(errors.LonghaulError):
    """'longhaul {command}' needs the module {module!r}. Install it: pip install 'longhaul[worker]'"""


class SystemRefused(errors.LonghaulError):
    """{what}: {reason}.{advice}"""

    def __init__(self, error: OSError) -> None:
        advice = {
            errno.ENOSPC: " Make room on this disk.",
            errno.EDQUOT: " Make room: the quota of this user is used up.",
            errno.EACCES: " Let this user write there, or name another place.",
            errno.EROFS: " Name another place.",
            errno.EMFILE: " Raise the limit of open files: ulimit -n 65536",
        }.get(error.errno or 0, "")
        what = error.filename or "The system refuses"
        super().__init__(what=what, reason=error.strerror or error, advice=advice)


class Failure(click.ClickException):
    """An error the user can act on: one line on standard error, no traceback."""

    def show(self, file: object = None) -> None:
        click.echo(values.printable_lines(f"longhaul: {self.message}"), err=True)


class Unreachable(Failure):
    exit_code = 5


class Commands(click.Group):
    """A group that also offers the entry points of `longhaul.commands`, imported only when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_plugins()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own or cmd_name not in _plugins():
            return own
        return click.Command(cmd_name, short_help=_PLUGIN_HELP.get(cmd_name, "Added by a plugin."))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in self.commands or name is None:
            return name, command, rest
        try:
            return name, _plugins()[name].load(), rest
        except ModuleNotFoundError as error:
            if ctx.resilient_parsing:  # Tab was pressed
                return name, command, rest
            raise MissingExtra(command=name, module=error.name) from None

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except client.ServerUnreachable as error:
            raise Unreachable(str(error)) from None
        except errors.LonghaulError as error:
            raise Failure(errors.advised(error, "Check --model.")) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever reads has gone: click knows what to do
                raise
            raise Failure(str(SystemRefused(error))) from None
        except ModuleNotFoundError as error:
            if ctx.invoked_subcommand not in _plugins():
                raise
            raise Failure(str(MissingExtra(command=ctx.invoked_subcommand, module=error.name))) from None
        except KeyboardInterrupt:
            click.echo("longhaul: interrupted", err=True)
            sys.exit(130)


@click.group(
    "longhaul",
    cls=Commands,
    commands=[
        *commands.CLIENT,
        *retention_commands.COMMANDS,
        report_command.report,
        key_commands.keys,
        queue_commands.queue_keys,
        autoscale_command.command,
        dataset_command.generate,
        top.top,
        doctor.doctor,
        completion.completion,
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="longhaul")
def main() -> None:
    """Batch LLM inference on your own GPUs.

    \b
    longhaul up --model smol=HuggingFaceTB/SmolLM2-135M-Instruct
    longhaul submit prompts.jsonl --watch
    longhaul results batch_01... -o results/

    Commands that talk to a server take --url and --api-key, or read LONGHAUL_API_URL and
    LONGHAUL_API_KEY. --json prints one JSON object a line, for programs.

    \b
    Exit codes:
      0    done; a job that was reported on has no failed request (or still runs)
      1    an error that the message names, a full quota among them
      2    wrong usage
      3    the job ended, but some of its requests failed
      4    the job itself failed, expired or was cancelled
      5    the server cannot be reached, or cannot work at the moment
      130  interrupted by Ctrl-C

    \b
    longhaul doctor                          # says what is wrong, and what to do about it
    longhaul completion bash >> ~/.bashrc    # has Tab complete commands and ids of jobs; zsh and fish, too
    """
    log.setup_command()


@main.command(short_help="Start everything on this machine.")
@click.option(
    "models",
    "--model",
    metavar="NAME=SOURCE",
    multiple=True,
    help="Serve a model: a hub id, a local directory or a GGUF file. Repeatable; a worker then takes turns"
    " over all of them.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="[default: 8000, or a free one]")
@click.option(
    "directory",
    "--dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".longhaul"),
    show_default=True,
    help="Where data and logs are kept.",
)
@click.option(
    "chat_template",
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A Jinja file to render chats with instead of the models' own templates.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="How many workers; each runs all models by turns, or LONGHAUL_MODEL. 0: others start them, such as"
    " 'longhaul autoscale'.",
)
def up(models: tuple[str, ...], port: int, directory: Path, chat_template: Path | None, workers: int) -> None:
    """Start everything on this machine: Redis, an S3 store, the API and workers.

    Nothing needs to be installed or configured by hand. Data and logs lie in --dir; the next start finds them
    again and goes on with unfinished jobs. Ctrl-C stops all of it (exit code 0). It listens on this machine
    only, and asks for no API key until there is one ('longhaul keys create'). More about a model than
    where it comes from (docs/settings.md) goes into LONGHAUL_MODELS, without --model. While it runs, the
    file 'environment' in --dir has the settings that other commands need.

    \b
    longhaul up --model smol=HuggingFaceTB/SmolLM2-135M-Instruct
    longhaul up --model llama=/models/llama-3.gguf --workers 2 --port 8080
    LONGHAUL_MODEL=a longhaul up --model a=org/a --model b=org/b     # its workers run a alone

    \b
    longhaul up --model a=org/a --model b=org/b --workers 0          # and in another shell:
    set -a; . .longhaul/environment; set +a; longhaul autoscale --max 2
    """
    from jobs import ports, sources, stack

    if not models and "LONGHAUL_MODELS" not in os.environ:
        raise click.UsageError("Name at least one model: --model NAME=SOURCE (or set LONGHAUL_MODELS).")
    own = {} if chat_template is None else {"chat_template": str(chat_template.resolve())}
    if own and not models:
        raise click.UsageError("--chat-template goes with --model; in LONGHAUL_MODELS it is a field.")
    if models and "LONGHAUL_MODELS" in os.environ:
        click.echo("longhaul: --model is given, so LONGHAUL_MODELS is not used.", err=True)
    if port and not ports.is_free(port):
        raise errors.LonghaulError(f"Port {port} is taken: stop what listens there, or give another --port.")
    served = {name: {"source": source} | own for name, source in map(_model, models)} or None
    configured = settings.Settings.load(**({"models": served} if served else {}))
    if configured.model is not None:
        _ = configured.served  # what is wrong is told before all starts
    sources.require(configured.models, {name: f"--model {name}=" for name in served or ()}, configured)
    parts = f"Redis, a store, the API and {values.counted(workers, 'worker')}"
    click.echo(f"Starting {parts} in {directory} ...", err=True)
    with stack.Stack(directory, models=served, workers=workers, api_port=port) as running:
        with contextlib.suppress(KeyboardInterrupt), _own_advice(bool(models)):
            click.echo(_started(running, directory))
            running.wait(lambda line: click.echo(values.printable_lines(line), err=True))
        click.echo("Stopping ...", err=True)


@main.command("recover", short_help="Bring unfinished jobs back into a Redis that lost them.")
def recover_jobs() -> None:
    """Bring unfinished jobs back into a Redis that lost them; print their ids.

    Workers and the API do this by themselves when Redis has restarted; this does it at once. It reads the
    store and Redis directly, so it needs the LONGHAUL_ variables of a server, not of a client. Running it
    twice, or beside a running system, changes nothing.

    \b
    set -a; . .longhaul/environment; set +a     # those of 'longhaul up'
    longhaul recover
    """
    from jobs import ledger, recover, store

    named_store.require()
    configured = settings.Settings.load()
    for job_id in recover.recover(ledger.Ledger.connect(configured), store.open_store(configured)):
        click.echo(job_id)


def _started(running: "stack.Stack", directory: Path) -> str:
    """Return what runs where, and what to type in another shell."""
    from jobs import keys, slots

    lines = [running.describe(), "In another shell:", f"  export LONGHAUL_API_URL={running.api_url}"]
    if keys.listed(key_commands.opened(directory)):
        lines += [
            f"  export LONGHAUL_API_KEY=...   # 'longhaul keys create TENANT --dir {directory}' makes one"
        ]
    lines += ["  longhaul submit prompts.jsonl --watch"]
    lines += [*running.others(directory, len(slots.gpus())), "Ctrl-C stops everything."]
    return "\n".join(lines)


@contextlib.contextmanager
def _own_advice(by_option: bool) -> Iterator[None]:
    """Have a worker's last words name the option that its models came by: it knows the variable alone."""
    try:
        yield
    except servers.ServerFailed as error:
        if not by_option:
            raise
        raise errors.LonghaulError(str(error).replace("Check LONGHAUL_MODELS.", "Check --model.")) from None


def _model(text: str) -> tuple[str, str]:
    name, equals, source = text.partition("=")
    if not (name and equals and source):
        raise click.BadParameter(f"{text!r} is not NAME=SOURCE.", param_hint="--model")
    return name, source


def _plugins() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=PLUGINS)}


if __name__ == "__main__":
    main(prog_name="longhaul")
