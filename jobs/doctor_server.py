"""Whether the API answers, knows the key, is of this version, and has workers for its models."""

import os
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from jobs import client, hints
from jobs.doctor_findings import Finding, Look

_look = Look("server")
_SILENT_SECONDS = 20.0
"""A worker reports every 5 s unless LONGHAUL_HEARTBEAT_SECONDS says otherwise."""

_KEY = "Set LONGHAUL_API_KEY; 'longhaul keys create TENANT' on the server's machine makes a key."
_BEHIND = "Redis or the store is away, or hangs: see above, and the server's log."


def check(
    api: client.Client, named: bool, key: str | None = None, directory: Path | None = None
) -> Iterator[Finding]:
    """Look at a server.

    named       somebody said where it is, so it should be there
    key         what it is sent
    directory   that of the 'longhaul up' that it is of
    """
    try:
        models = [str(model["id"]) for model in api.get("/v1/models")["data"]]
    except client.ServerBusy as error:
        yield _busy(error)
        return
    except client.ServerUnreachable as error:
        state = _look.wrong if named else _look.unchecked
        advice = "Start it ('longhaul up', 'python -m api'), or say --url or LONGHAUL_API_URL."
        yield state("reachable", f"no answer from {api.url}: {error.values['reason']}", advice)
        return
    except client.ServerRefused as error:
        yield refused(api.url, error, key)
        return
    yield _look.ok("reachable", f"{api.url} answers, and {'takes this key' if key else 'asks for no key'}")
    try:
        told = api.get("/v1/workers")
    except client.ServerBusy as error:
        yield _busy(error)
        return
    except client.ServerUnreachable as error:  # it has just answered what needs no Redis
        said = f"{api.url} answers nothing that needs Redis or the store: {error.values['reason']}"
        yield _look.wrong("ready", said, _BEHIND)
        return
    except client.ServerRefused as error:
        advice = "It is older than this command." if error.status == 404 else "See the message."
        yield _look.unchecked("workers", str(error).split("\n")[0], advice)
        return
    yield _version(told["api_version"])
    yield from workers(told["data"], models, directory)


def _busy(error: client.ServerBusy) -> Finding:
    return _look.wrong("ready", f"{error.values['url']}: {error.values['reason']}", _BEHIND)


def refused(url: str, error: client.ServerRefused, key: str | None) -> Finding:
    """Judge a refusal."""
    if error.status == 401:
        said = (
            "does not know this key: it is mistyped, revoked or another store's" if key else "asks for a key"
        )
        return _look.wrong("key", f"{url} {said}", _KEY)
    said = f"{url}: {error.values['message']}"
    return _look.wrong("reachable", said, "Something else listens there: check --url.")


def _version(theirs: str) -> Finding:
    ours = metadata.version("longhaul")
    if theirs != ours:
        said = f"the server has {theirs}, this is {ours}"
        return _look.warning("version", said, "Install the same on both: pip install longhaul==" + theirs)
    return _look.ok("version", f"{theirs}, as here")


def workers(
    present: list[dict[str, Any]], models: list[str], directory: Path | None = None
) -> Iterator[Finding]:
    """Judge the workers that reported of late, for these served models; `directory`: of a 'longhaul up'."""
    if not present:
        model = None if "LONGHAUL_MODEL" in os.environ else hints.any_of(len(models))
        advice = f"Nothing runs; start one: {hints.worker(model, directory)}"
        yield _look.warning("workers", "there are none", advice)
        return
    states = Counter(str(worker["state"]) for worker in present)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield _look.ok("workers", f"{len(present)}: {told}")
    run = {name for worker in present for name in (*worker["models"], worker["model"]) if name}
    if idle := [name for name in models if name not in run]:
        advice = f"Its requests wait; start one: {hints.worker(','.join(idle), directory)}"
        yield _look.warning("models", f"no worker runs {', '.join(idle)}", advice)
    late = [str(worker["id"]) for worker in present if worker["age_seconds"] > _SILENT_SECONDS]
    if late:
        advice = "They hang, are gone, or cannot reach Redis: see their logs."
        yield _look.warning("workers", f"not heard of for {_SILENT_SECONDS:g} s: {', '.join(late)}", advice)
    versions = sorted({str(worker["version"]) for worker in present})
    if versions != [metadata.version("longhaul")]:
        yield _look.warning("workers", f"versions: {', '.join(versions)}", "Restart them with the same.")
