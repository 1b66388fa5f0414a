"""Whether the API answers, knows the key, is of this version, and has workers for its models."""

from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from jobs import client, errors
from jobs.doctor_findings import Finding, Look

_look = Look("server")
_SILENT_SECONDS = 20.0
"""A worker reports every 5 s unless LONGHAUL_HEARTBEAT_SECONDS says otherwise."""


def check(api: client.Client, named: bool) -> Iterator[Finding]:
    """Look at a server; `named`: somebody said where it is, so that it should be there."""
    try:
        models = [str(model["id"]) for model in api.get("/v1/models")["data"]]
    except client.ServerBusy as error:
        yield _look.wrong("ready", str(error), "Redis or the store is away: see above, and its log.")
        return
    except client.ServerUnreachable as error:
        state = _look.wrong if named else _look.unchecked
        advice = "Start it ('longhaul up', 'python -m api'), or say --url or LONGHAUL_API_URL."
        yield state("reachable", f"no answer from {api.url}: {error.values['reason']}", advice)
        return
    except client.ServerRefused as error:
        yield refused(api.url, error)
        return
    yield _look.ok("reachable", f"{api.url} answers, and takes this key")
    try:
        told = api.get("/v1/workers")
    except errors.LonghaulError as error:
        yield _look.unchecked("workers", str(error).split("\n")[0], "It is older than this command.")
        return
    yield _version(told["api_version"])
    yield from workers(told["data"], models)


def refused(url: str, error: client.ServerRefused) -> Finding:
    """Judge a refusal."""
    if error.status == 401:
        advice = "Make a key on the server ('longhaul keys create TENANT') and set LONGHAUL_API_KEY."
        return _look.wrong("key", f"{url}: {error}", advice)
    return _look.wrong("reachable", f"{url}: {error}", "Something else listens there: check --url.")


def _version(theirs: str) -> Finding:
    ours = metadata.version("longhaul")
    if theirs != ours:
        said = f"the server has {theirs}, this is {ours}"
        return _look.warning("version", said, "Install the same on both: pip install longhaul==" + theirs)
    return _look.ok("version", f"{theirs}, as here")


def workers(present: list[dict[str, Any]], models: list[str]) -> Iterator[Finding]:
    """Judge the workers that reported of late, for these served models."""
    if not present:
        advice = "Nothing runs: start one ('longhaul up', or 'celery -A worker worker')."
        yield _look.warning("workers", "there are none", advice)
        return
    states = Counter(str(worker["state"]) for worker in present)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    yield _look.ok("workers", f"{len(present)}: {told}")
    run = {name for worker in present for name in (*worker["models"], worker["model"]) if name}
    if idle := [name for name in models if name not in run]:
        advice = "Requests for it wait: start a worker with LONGHAUL_MODEL, or 'longhaul autoscale'."
        yield _look.warning("models", f"no worker runs {', '.join(idle)}", advice)
    late = [str(worker["id"]) for worker in present if worker["age_seconds"] > _SILENT_SECONDS]
    if late:
        advice = "They hang, are gone, or cannot reach Redis: see their logs."
        yield _look.warning("workers", f"not heard of for {_SILENT_SECONDS:g} s: {', '.join(late)}", advice)
    versions = sorted({str(worker["version"]) for worker in present})
    if versions != [metadata.version("longhaul")]:
        yield _look.warning("workers", f"versions: {', '.join(versions)}", "Restart them with the same.")
