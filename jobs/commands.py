"""The commands that talk to a server: submit, status, watch, results, cancel, list."""

import functools
import uuid
from collections.abc import Callable
from typing import Any

import click
import orjson

from jobs import (
    client,
    completion,
    creation,
    download,
    listing,
    masking,
    overall,
    places,
    progress,
    schema,
    standstill,
    submission,
    terminal,
    values,
)

_WATCH_PATIENCE_SECONDS = 60.0


class Session:
    """What every command here is told: which server, which key, and whether a program reads the output."""

    new_client = client.Client
    poll_seconds = 1.0

    def __init__(self, url: str, api_key: str | None, as_json: bool) -> None:
        self.url, self.api_key, self.as_json = url, api_key, as_json
        masking.learn([api_key], [url])
        self.shown_url = masking.without_password(url)
        self._told: set[str] = set()

    def connect(self, patience_seconds: float = 5.0, **options: Any) -> client.Client:
        options = {"on_retry": self._tell_retry} | options
        return self.new_client(self.url, self.api_key, patience_seconds=patience_seconds, **options)

    def say(self, batch: client.Batch, text: str) -> None:
        """Print a job for whoever reads: as JSON, or in words."""
        click.echo(batch.model_dump_json() if self.as_json else text)

    def _tell_retry(self, reason: str) -> None:
        if reason not in self._told:
            click.echo(values.printable(f"longhaul: {self.shown_url}: {reason}; trying again"), err=True)
        self._told.add(reason)


def talks_to_server(command: Callable[..., None]) -> Callable[..., None]:
    """Add --url, --api-key and --json; the command gets them as a Session."""

    @click.option(
        "--url",
        envvar="LONGHAUL_API_URL",
        default=client.DEFAULT_URL,
        show_default=True,
        show_envvar=True,
        help="Where the API listens.",
    )
    @click.option("--api-key", envvar="LONGHAUL_API_KEY", show_envvar=True, help="Sent as a bearer token.")
    @click.option("as_json", "--json", is_flag=True, help="Print JSON objects, one a line.")
    @functools.wraps(command)
    def wrapped(url: str, api_key: str | None, as_json: bool, **arguments: Any) -> None:
        command(Session(url, api_key, as_json), **arguments)

    return wrapped


@click.command()
@click.argument("file")
@click.option(
    "--endpoint",
    type=click.Choice(creation.SERVED_ENDPOINTS),
    help="What every line asks for.  [default: the url of the first line]",
)
@click.option("--window", default="24h", show_default=True, help="Time the job may take: 30m, 24h, 7d.")
@click.option("--metadata", metavar="KEY=VALUE", multiple=True, help="Kept with the job. Repeatable.")
@click.option(
    "--priority", type=click.IntRange(-100, 100), default=0, show_default="0", help="Higher is fed first."
)
@click.option(
    "--idempotency-key",
    metavar="KEY",
    help="Submitting the same file with the same key again gives the same job.",
)
@click.option("watched", "--watch", is_flag=True, help="Go on as 'longhaul watch' does.")
@talks_to_server
def submit(
    session: Session,
    file: str,
    endpoint: str | None,
    window: str,
    metadata: tuple[str, ...],
    priority: int,
    idempotency_key: str | None,
    watched: bool,
) -> None:
    """Upload FILE and create a job from it; print the job's id.

    FILE has one request a line, in the OpenAI Batch form; '-' reads standard input:

    \b
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "Hi"}}

    \b
    longhaul submit prompts.jsonl --watch
    longhaul submit prompts.jsonl --window 7d --metadata team=search --priority 5
    make-prompts | longhaul submit - --idempotency-key nightly-2026-01-31

    A lost answer never makes two jobs: each run sends a key of its own unless you give one.
    """
    body: dict[str, Any] = {"completion_window": window}
    if metadata:
        body["metadata"] = dict(_pair(text) for text in metadata)
    if priority:
        body["priority"] = priority
    with submission.opened(file) as stream, session.connect() as api:
        url = submission.first_url(file, stream)
        body["endpoint"] = endpoint or url or schema.ENDPOINTS[0]
        body["input_file_id"] = submission.upload(api, file, stream, once=idempotency_key is not None)
        try:
            batch = api.create(body, idempotency_key or str(uuid.uuid4()))
        except client.ServerRefused:
            if idempotency_key is None:  # else it may be the input of an earlier job
                api.delete_file(body["input_file_id"])
            raise
    if watched and not session.as_json:
        click.echo(batch.id)
    elif not watched:
        session.say(batch, batch.id)
        return
    _watch(session, batch.id)


@click.command()
@click.argument("job_id", metavar="ID", shell_complete=completion.job_ids)
@talks_to_server
def status(session: Session, job_id: str) -> None:
    """Print where a job stands. The exit code tells how it ended.

    \b
    longhaul status batch_01jx2k5m8q9r3t4v6w7y8z0abc
    longhaul status batch_01jx2k5m8q9r3t4v6w7y8z0abc --json | jq .request_counts
    """
    with session.connect() as api:
        batch = api.batch(job_id)
        reason = None if session.as_json else standstill.now(api, batch)
    if reason:
        click.echo(values.printable(f"{batch.id} waits: {reason}"), err=True)
    _report(session, batch)


@click.command(short_help="Show a job's progress until it ends.")
@click.argument("job_id", metavar="ID", shell_complete=completion.job_ids)
@talks_to_server
def watch(session: Session, job_id: str) -> None:
    """Show a job's progress until it ends: requests, tokens per second, time left.

    On a terminal it is a bar; elsewhere, or with NO_COLOR set, plain lines on standard error. Ctrl-C stops
    the watching, never the job. A server that restarts meanwhile is waited for. The time left is told once a
    twentieth of the requests, or fifty, have succeeded before its eyes; loading a model does not count.

    \b
    longhaul watch batch_01jx2k5m8q9r3t4v6w7y8z0abc && echo all requests succeeded
    """
    _watch(session, job_id)


@click.command(short_help="Fetch the lines of a job.")
@click.argument("job_id", metavar="ID", shell_complete=completion.job_ids)
@click.option(
    "place", "-o", "--output", metavar="DIR|FILE", help="Where lines go.  [default: standard output]"
)
@click.option("only_errors", "--errors", is_flag=True, help="The error lines instead of the output lines.")
@click.option("followed", "--follow", is_flag=True, help="Give lines as they finish, until the job ends.")
@talks_to_server
def results(session: Session, job_id: str, place: str | None, only_errors: bool, followed: bool) -> None:
    """Fetch the lines of a finished job, or with --follow of a running one.

    Output lines are in input order and go to standard output. -o FILE writes them to a file; -o DIR (one
    that exists, or a name that ends with a slash) writes all that a job has made there: ID.jsonl,
    ID.errors.jsonl, ID.metrics.jsonl (latencies of each request) and ID.summary.json. With --follow there
    are only output and errors, in the order of finishing. --json reports which files were written; it
    needs -o.

    \b
    longhaul results batch_01jx2k5m8q9r3t4v6w7y8z0abc | jq -r .response.body.choices[0].message.content
    longhaul results batch_01jx2k5m8q9r3t4v6w7y8z0abc -o results/
    longhaul results batch_01jx2k5m8q9r3t4v6w7y8z0abc --errors --follow
    """
    to = download.targets(job_id, place, only_errors=only_errors, followed=followed)
    for path in filter(None, to.values()):
        places.check(path)
    if session.as_json and None in to.values():
        raise click.UsageError("--json reports on files: say where they go with -o.")
    with session.connect(_WATCH_PATIENCE_SECONDS) as api:
        if followed:
            batch = download.follow(api, job_id, to, poll_seconds=session.poll_seconds)
        else:
            batch = api.batch(job_id)
            to = download.fetch(api, batch, to)
    files = {kind: str(path) for kind, path in to.items() if path}
    if session.as_json:
        click.echo(orjson.dumps({"id": batch.id, "status": batch.status, "files": files}))
    else:
        click.echo(summary(batch, *files.values()), err=True)
    raise SystemExit(exit_code(batch))


@click.command()
@click.argument("job_id", metavar="ID", shell_complete=completion.job_ids)
@talks_to_server
def cancel(session: Session, job_id: str) -> None:
    """Cancel a job. What has finished is kept; the rest gets batch_cancelled error lines.

    \b
    longhaul cancel batch_01jx2k5m8q9r3t4v6w7y8z0abc
    longhaul watch batch_01jx2k5m8q9r3t4v6w7y8z0abc      # until its files are there
    """
    with session.connect() as api:
        batch = api.cancel(job_id)
    session.say(batch, f"{batch.id} {batch.status}")


@click.command("list", short_help="List jobs, newest first.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--after", metavar="ID", help="Go on behind this job.", shell_complete=completion.job_ids)
@talks_to_server
def list_jobs(session: Session, limit: int, after: str | None) -> None:
    """List jobs, newest first: id, state, requests done and failed, when it was created, model.

    Below one whose input was refused stands why. Programs read --json: the columns are for people, and a
    narrow terminal has fewer of them, below the id.

    \b
    longhaul list --limit 100
    longhaul list --json | jq -r 'select(.status == "in_progress") | .id'
    """
    with session.connect() as api:
        batches = api.batches(limit, after)
    if session.as_json:
        for batch in batches:
            click.echo(batch.model_dump_json())
    elif not batches:
        click.echo("longhaul: no jobs. Make one: longhaul submit prompts.jsonl", err=True)
    else:
        width = terminal.width()
        click.echo("\n".join(listing.lines(batches, width, terminal.printer(width or listing.UNLIMITED))))


CLIENT: list[click.Command] = [submit, status, watch, results, cancel, list_jobs]


def _watch(session: Session, job_id: str) -> None:
    try:
        with session.connect(_WATCH_PATIENCE_SECONDS) as api:
            batch = progress.watch(
                api, job_id, progress.view(session.as_json), poll_seconds=session.poll_seconds
            )
    except KeyboardInterrupt:
        click.echo(
            f"longhaul: stopped watching; the job goes on. To watch it again: longhaul watch {job_id}",
            err=True,
        )
        raise SystemExit(130) from None
    if session.as_json:
        raise SystemExit(exit_code(batch))
    _report(session, batch)


def _report(session: Session, batch: client.Batch) -> None:
    """Print how a job stands and leave with the code that says how it ended."""
    words = summary(batch)
    if batch.output_file_id or batch.error_file_id:
        words += f"\nFetch the results: longhaul results {batch.id} -o results/"
    session.say(batch, words)
    raise SystemExit(exit_code(batch))


def summary(batch: client.Batch, *written: str) -> str:
    """Return a job in a few lines of words, with the files that were written."""
    counts, usage = batch.request_counts, batch.usage
    faults = batch.errors.data if batch.errors else []
    missing = overall.never_ran(batch)
    never = f", {missing:,} never ran" if missing else ""
    what = (
        f"{counts.completed:,} completed, {counts.failed:,} failed of {counts.total:,}{never}; "
        f"{usage.input_tokens:,} input and {usage.output_tokens:,} output tokens"
    )
    if faults and not counts.total:
        what = f"its input was refused, and nothing ran ({values.counted(len(faults), 'error')})"
    lines = [f"{batch.id} {batch.status}: {what}"]
    lines += [f"  {listing.fault(error)}" for error in faults[: progress.MOST_FAULTS]]
    if len(faults) > progress.MOST_FAULTS:
        lines.append(f"  and {len(faults) - progress.MOST_FAULTS} more: longhaul status {batch.id} --json")
    lines += [f"  {path}" for path in written]
    return "\n".join(lines)


def exit_code(batch: client.Batch) -> int:
    """Return 4 for a job that failed, expired or was cancelled, 3 for one with failed requests, else 0."""
    if batch.ended and batch.status != "completed":
        return 4
    return 3 if batch.ended and batch.request_counts.failed else 0


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise click.BadParameter(f"{text!r} is not KEY=VALUE.", param_hint="--metadata")
    return key, value
