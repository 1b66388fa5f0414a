"""Shell completion: the line that turns it on, and the ids of jobs where a command wants one."""

import contextlib
import glob
import os
from typing import Any

import click
from click import shell_completion

from jobs import client

_PREFIX = "batch_"
_SECONDS = 1.5
_MOST = 50
_LINES = {
    "bash": 'eval "$(_LONGHAUL_COMPLETE=bash_source longhaul)"',
    "zsh": 'eval "$(_LONGHAUL_COMPLETE=zsh_source longhaul)"',
    "fish": "_LONGHAUL_COMPLETE=fish_source longhaul | source",
}
_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/completions/longhaul.fish"}


@click.command(short_help="Print the line that turns completion on.")
@click.argument("shell", type=click.Choice(list(_LINES)))
def completion(shell: str) -> None:
    """Print the line that makes SHELL complete commands, options and ids of jobs.

    zsh needs 'autoload -Uz compinit && compinit' before it.

    \b
    longhaul completion bash >> ~/.bashrc
    longhaul completion zsh >> ~/.zshrc
    longhaul completion fish > ~/.config/fish/completions/longhaul.fish
    """
    click.echo(_LINES[shell])
    click.echo(f"longhaul: this goes into {_FILES[shell]}; new shells have it.", err=True)


def job_ids(
    context: click.Context, parameter: click.Parameter, beginning: str
) -> list[shell_completion.CompletionItem]:
    """Return the newest jobs whose ids begin so; none where no server says so at once."""
    given = context.params
    url = given.get("url") or os.environ.get("LONGHAUL_API_URL") or client.DEFAULT_URL
    key = given.get("api_key") or os.environ.get("LONGHAUL_API_KEY")
    try:
        with client.Client(url, key, patience_seconds=0, read_seconds=_SECONDS) as api:
            batches = api.batches(_MOST)
    except Exception:  # whatever it is, a person who presses Tab must not see it
        return []
    return [_item(batch) for batch in batches if batch.id.startswith(beginning)]


def reports(
    context: click.Context, parameter: click.Parameter, beginning: str
) -> list[shell_completion.CompletionItem]:
    """Return jobs and outputs of 'longhaul run' that begin so; of none, the shell names files."""
    found = []
    if beginning.startswith(_PREFIX) or _PREFIX.startswith(beginning):
        found = job_ids(context, parameter, beginning)
    with contextlib.suppress(OSError):
        found += [shell_completion.CompletionItem(name) for name in _outputs(beginning)]
    return found or [shell_completion.CompletionItem(beginning, type="file")]


def _outputs(beginning: str) -> list[str]:
    """Return the outputs beside which a summary lies."""
    ends = (".summary.json", ".jsonl")
    places = glob.glob(f"{glob.escape(beginning)}*{ends[0]}")
    outputs = [place.removesuffix(ends[0]) + ends[1] for place in places]
    return sorted(output for output in outputs if output.startswith(beginning))


def _item(batch: Any) -> shell_completion.CompletionItem:
    told = f"{batch.status} {batch.done:,}/{batch.request_counts.total:,}"
    return shell_completion.CompletionItem(batch.id, help=told)
