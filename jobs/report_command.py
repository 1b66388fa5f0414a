"""The command that draws a finished job: report."""

import os
from pathlib import Path
from typing import Any

import click
import orjson

from jobs import commands, completion, download, errors, places
from jobs.report import charts, draw, page, sources


@click.command(short_help="Draw what a finished job did, as a page or pictures.")
@click.argument("subject", metavar="ID|OUT", shell_complete=completion.reports)
@click.option(
    "output", "-o", "--output", metavar="FILE", help="Where the page goes.  [default: NAME.report.html here]"
)
@click.option(
    "picture", "--png", metavar="FILE|DIR", help="The plots as pictures: one, or one for each in DIR."
)
@commands.talks_to_server
def report(session: commands.Session, subject: str, output: str | None, picture: str | None) -> None:
    """Draw a finished job: latencies, tokens per second, batch sizes, lengths, shared prefixes, errors.

    ID is a job of a server; OUT is what 'longhaul run' wrote its results to, or 'longhaul results -o DIR',
    with its .metrics.jsonl and .summary.json beside it. The page is one file that fetches nothing, light or
    dark as the reader's screen is, with the numbers below each plot. --png alone writes no page. --json
    prints the figures, and writes a page only with -o. Needs matplotlib: pip install 'longhaul[report]'.

    \b
    longhaul report batch_01jx2k5m8q9r3t4v6w7y8z0abc -o report.html
    longhaul report batch_01jx2k5m8q9r3t4v6w7y8z0abc --png plots/
    longhaul report out.jsonl --png report.png
    longhaul report out.jsonl --json | jq .latency.ttft_seconds.p99
    """
    _refuse_other_files(output, picture)
    for place, option in ((output, "-o"), (picture, "--png")):
        if place:
            places.check(Path(place), option)
    found = _subject(session, subject)
    _refuse_own_files(found, subject, output, picture)
    if output is None and picture is None and not session.as_json:
        output = f"{Path(found.name).stem}.report.html"
    with sources.readable(f"the summary of {found.name}"):  # an older one may lack what is shown
        drawn = charts.charts(found)
        shown = page.page(found, drawn).encode() if output else b""
    if output:
        _write(Path(output), shown)
    written = [output] if output else []
    written += _pictures(picture, drawn) if picture else []
    if session.as_json:
        click.echo(orjson.dumps(_figures(found)))
    else:
        click.echo("\n".join(written))
    raise SystemExit(_exit_code(found))


def _subject(session: commands.Session, name: str) -> sources.Subject:
    if os.sep in name or "." in name or Path(name).exists():
        return sources.of_run(Path(name))
    with session.connect() as api:
        return sources.of_job(api, api.batch(name))


def _refuse_other_files(output: str | None, picture: str | None) -> None:
    """Refuse names under which nobody would look for a page or a picture, before anything is fetched."""
    if {output, picture} & {"", "-"}:
        raise click.UsageError("-o and --png name files: a report does not go to standard output.")
    if output and (_is_directory(output) or not output.lower().endswith((".html", ".htm"))):
        raise click.UsageError(
            f"-o {output}: the page goes into a file whose name ends in .html. Pictures go where --png says."
        )
    if picture and not (_is_directory(picture) or picture.lower().endswith(".png")):
        raise click.UsageError(
            f"--png {picture}: all plots go into a file whose name ends in .png, or one by one into a "
            f"directory: {Path(picture).with_suffix('')}.png or {Path(picture).with_suffix('')}{os.sep}"
        )


def _is_directory(place: str) -> bool:
    return place.endswith(os.sep) or Path(place).is_dir()


def _refuse_own_files(found: sources.Subject, name: str, *written: str | None) -> None:
    """Refuse to write over what the report is made of."""
    own = {os.path.realpath(path) for path in places.of_job(Path(name)).values()}
    for place in written:
        if place and os.path.realpath(place) in own:
            raise click.UsageError(f"The report of {found.name} would write over {place}. Name another file.")


def _pictures(place: str, drawn: list[charts.Chart]) -> list[str]:
    """Write pictures, and return where."""
    if not drawn:
        raise errors.InvalidRequest("No request of it ran, so there is nothing to draw: leave out --png.")
    if not _is_directory(place):
        _write(Path(place), draw.png([(one.title, one.drawing, one.height) for one in drawn]))
        return [place]
    paths = [Path(place) / f"{one.name}.png" for one in drawn]
    for path, one in zip(paths, drawn, strict=True):
        _write(path, draw.png([(one.title, one.drawing, one.height)]))
    return list(map(str, paths))


def _figures(found: sources.Subject) -> dict[str, Any]:
    counts = {"total": found.total, "completed": found.completed, "failed": found.failed}
    return {
        "name": found.name,
        "status": found.status,
        "counts": counts,
        **found.facts,
        **found.figures.to_json(),
        "summary": found.summary,
    }


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    with download.whole(path) as stream:
        stream.write(data)


def _exit_code(found: sources.Subject) -> int:
    """Return what the other commands leave with for a job that ended so."""
    if found.status != "completed":
        return 4
    return 3 if found.failed else 0
