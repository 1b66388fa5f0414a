"""`longhaul keys`: make, list and revoke API keys, in the store itself."""

import shlex
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
import orjson
from pydantic import TypeAdapter, ValidationError

from jobs import keys as keys_module
from jobs import named_store, settings, store, values
from jobs.store import ObjectStore


def in_store(command: Callable[..., None]) -> Callable[..., None]:
    """Add --dir; the command gets the store that it means, or that of the settings."""

    @click.option(
        "directory",
        "--dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="The directory of a running 'longhaul up', for its store.  [default: LONGHAUL_STORE_URL]",
    )
    @wraps(command)
    def wrapped(directory: Path | None, **arguments: Any) -> None:
        command(opened(directory), **arguments)

    return wrapped


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    A key is for a tenant, who sees its own files and jobs only. As long as there is no key at all, the API
    answers its own machine only, as the tenant 'default'. From the first key on it asks for one, and revoking
    the last does not change that. What is done here counts after at most 5 seconds, in every API.

    These commands read and write the store directly, so they need the LONGHAUL_ variables of a server, or
    --dir.

    \b
    longhaul keys create search-team --name "nightly jobs"
    longhaul keys list
    longhaul keys revoke 01jx2k5m8q9r3t4v6w7y8z0abc
    """


@keys.command()
@click.argument("tenant")
@click.option("--name", default="", metavar="TEXT", help="What it is for, to find it again in the list.")
@in_store
def create(objects: ObjectStore, tenant: str, name: str) -> None:
    """Make a key for TENANT and print it: the only time that it can be seen.

    TENANT has small letters, digits and dashes. From the first key on every request needs one, also those of
    this machine's page; what was made before is the tenant 'default', for which a key can be made, too.

    \b
    longhaul keys create search-team --name "nightly jobs"
    longhaul keys create default --dir .longhaul       # for a running 'longhaul up'
    export LONGHAUL_API_KEY=$(longhaul keys create search-team)
    """
    _check(tenant, name)
    is_first = not keys_module.listed(objects)
    record, key = keys_module.create(objects, tenant, name)
    click.echo(key)
    click.echo(
        f"longhaul: key {record.id} of {tenant}, in {objects.url}. It is not shown again. "
        "Clients send it as --api-key, LONGHAUL_API_KEY or 'Authorization: Bearer'.",
        err=True,
    )
    if is_first:
        directory = click.get_current_context().params["directory"]
        click.echo(_first(objects, tenant, directory), err=True)


@keys.command("list")
@click.option("as_json", "--json", is_flag=True, help="Print JSON objects, one a line.")
@in_store
def list_keys(objects: ObjectStore, as_json: bool) -> None:
    """List all keys, oldest first: id, tenant, name, when made, when revoked.

    \b
    longhaul keys list
    longhaul keys list --json | jq -r 'select(.revoked_at == null) | .id'
    """
    for record in keys_module.read_all(objects, keys_module.listed(objects)).values():
        if record is None:
            continue
        facts = (record.id, record.tenant, record.name, record.created_at, record.revoked_at)
        if as_json:
            names = ("id", "tenant", "name", "created_at", "revoked_at")
            click.echo(orjson.dumps(dict(zip(names, facts, strict=True))))
        else:
            click.echo("\t".join((*(text or "-" for text in facts[:3]), *map(_time, facts[3:]))))


@keys.command()
@click.argument("key_id", metavar="ID")
@in_store
def revoke(objects: ObjectStore, key_id: str) -> None:
    """Revoke the key ID, for good. Jobs that were made with it run on.

    \b
    longhaul keys revoke 01jx2k5m8q9r3t4v6w7y8z0abc
    """
    if key_id.startswith("lh_"):
        raise click.BadParameter("That is a key; give its id, the part between lh_ and _.", param_hint="ID")
    record = keys_module.revoke(objects, key_id)
    click.echo(f"{record.id} of {record.tenant} revoked {_time(record.revoked_at)}")


def _first(objects: ObjectStore, tenant: str, directory: Path | None) -> str:
    """Return what the first key of a store changes for whoever has used it without one."""
    nobodys = keys_module.DEFAULT_TENANT
    told = "longhaul: It is the first key: from now on every request needs one, and so does the page."
    jobs = sum(1 for _ in objects.list(f"job-index/{nobodys}/"))
    files = sum(1 for _ in objects.list(f"file-records/{nobodys}/"))
    if tenant == nobodys or not jobs + files:
        return told
    same = f" --dir {shlex.quote(str(directory))}" if directory else ""
    made = " and ".join(filter(None, (values.counted(jobs, "job"), values.counted(files, "file"))))
    return (
        f"{told} {made} made without a key {'is' if jobs + files == 1 else 'are'} of the tenant '{nobodys}', "
        f"which {tenant} does not see: 'longhaul keys create {nobodys}{same}' makes a key that does."
    )


def opened(directory: Path | None) -> ObjectStore:
    """Open the store of the 'longhaul up' that runs in a directory; None: that of the variables."""
    opened = store.open_store(named_store.settings(directory))
    opened.check()
    return opened


def _check(tenant: str, name: str) -> None:
    try:
        TypeAdapter(settings.Tenant).validate_python(tenant)
    except ValidationError:
        raise click.BadParameter(
            f"{tenant!r:.80} is not a name of small letters, digits and dashes, at most 63, no dash first.",
            param_hint="TENANT",
        ) from None
    if len(name) > 100 or not name.isprintable():
        raise click.BadParameter("At most 100 characters, on one line.", param_hint="--name")


def _time(seconds: Any) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
