"""The commands that remove: delete a job, sweep the store."""

import click
import orjson

from jobs import commands, completion, named_store, settings, values


@click.command(short_help="Delete an ended job and its results.")
@click.argument("job_id", metavar="ID", shell_complete=completion.job_ids)
@commands.talks_to_server
def delete(session: commands.Session, job_id: str) -> None:
    """Delete a job that has ended: its results, its metrics, and all else but its input file.

    A job that runs is refused: cancel it first.

    \b
    longhaul delete batch_01jx2k5m8q9r3t4v6w7y8z0abc
    """
    with session.connect() as api:
        api.delete(job_id)
    if session.as_json:
        click.echo(orjson.dumps({"id": job_id, "object": "batch", "deleted": True}))
    else:
        click.echo(f"{job_id} deleted")


@click.command(short_help="Remove expired files and leftovers from the store.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("as_json", "--json", is_flag=True, help="Print JSON objects, one a line.")
def sweep(dry_run: bool, as_json: bool) -> None:
    """Remove expired files and what broke off from the store; print what that was.

    The API and the workers do this by themselves, for what changed in the last days; this looks at
    everything, now. It reads the store and Redis directly, so it needs the LONGHAUL_ variables of a server,
    not of a client. It is safe beside a running system, and may be interrupted.

    \b
    set -a; . .longhaul/environment; set +a     # those of 'longhaul up'
    longhaul sweep --dry-run
    """
    from jobs import ledger_scripts, store, sweeper

    named_store.require()
    configured = settings.Settings.load()
    client = ledger_scripts.connect(configured.redis_url)
    task = sweeper.Sweeper(configured, client, store.open_store(configured))
    removed = task.run(everything=True, dry_run=dry_run)
    for kind, count in sorted(removed.objects.items()):
        facts = {"kind": kind, "objects": count, "bytes": removed.bytes[kind]}
        click.echo(orjson.dumps(facts) if as_json else f"{count:>8}  {removed.bytes[kind]:>14,} B  {kind}")
    objects, size = removed.objects.total(), removed.bytes.total()
    total = f"{values.counted(objects, 'object')}, {values.counted(size, 'byte')}"
    click.echo(f"longhaul: {'would remove' if dry_run else 'removed'} {total}", err=True)


COMMANDS: list[click.Command] = [delete, sweep]
