"""The command `longhaul top`: what happens now, live on a terminal, once elsewhere."""

import os
import sys

import click
import orjson

from jobs import commands, terminal, top_data, top_view, values

_READ_SECONDS = 12.0
"""A server whose Redis or store hangs says so within some ten seconds."""
_PATIENCE_SECONDS = 3.0
_JOBS_ONCE = 20
_WIDTH_ELSEWHERE = 160


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks; more where the server is slow.",
)
@click.option("--once", is_flag=True, help="Print one table and end.")
@commands.talks_to_server
def top(session: commands.Session, interval: float, once: bool) -> None:
    """Show jobs, what waits, and workers, live.

    Jobs, newest first: state, progress, requests and generated tokens a second, failed requests, time left.
    What of yours waits, by model and by the longest prompt of a bucket. Workers: the running batch of the
    most there may be, tokens a second, how much of their prompts was shared, use of the room for KV.

    Keys: q quits; j, k and the arrows scroll; space and b go a page on and back; Tab chooses the list. Where
    the output is no terminal it prints one table, as with --once; --json prints one object, and ends. A
    server that is away is waited for; --once waits some ten seconds at most (exit code 5).

    \b
    longhaul top
    longhaul top --once --url http://gpu-1:8000
    longhaul top --json | jq '.workers[] | {id, output_tokens_per_second}'
    """
    if session.as_json or once or not _on_terminal():
        with session.connect(_PATIENCE_SECONDS, read_seconds=_READ_SECONDS) as api:
            snapshot = top_data.Reader(api).read(_JOBS_ONCE)
        if session.as_json:
            click.echo(orjson.dumps(snapshot.json()))
        else:
            _print(snapshot, session.shown_url)
        return
    from jobs import top_terminal  # termios is not everywhere

    with session.connect(0.0, read_seconds=_READ_SECONDS, on_retry=lambda reason: None) as api:
        feed = top_terminal.Feed(top_data.Reader(api), interval, session.shown_url)
        top_terminal.show(feed, session.shown_url)


def _on_terminal() -> bool:
    # A dumb one cannot be drawn on; one without colour can.
    streams = (sys.stdin, sys.stdout)
    return all(map(terminal.is_terminal, streams)) and os.environ.get("TERM") != "dumb"


def _print(snapshot: top_data.Snapshot, url: str) -> None:
    printed = terminal.printer(terminal.width(elsewhere=_WIDTH_ELSEWHERE))
    width = printed.width
    parts = (
        top_view.head(snapshot, top_view.View(), url, width),
        top_view.jobs_table(snapshot.jobs, width),
        "",
        top_view.queue_table(snapshot.queue["models"], width),
        "",
        top_view.workers_table(snapshot.workers, width),
    )
    for part in parts:
        printed.print(part)
    if why := top_view.standing(snapshot.jobs):
        printed.print(f"\n{values.printable(why)}", markup=False)
