"""How the ledger reaches Redis: the connection, the names of its keys, and its scripts."""

from collections.abc import Sequence
from importlib import resources
from typing import Any

import redis

from jobs import buckets, errors
from jobs.ledger_retry import Bounded
from jobs.masking import without_password

_GLOBAL = (
    "control",
    "unit_owners",
    "unit_attempts",
    "unit_failures",
    "ready_plan",
    "ready_feed",
    "ready_finalize",
    "unit_given",
    "later",
    "feeding",
    "open",
    "open_requests",
    "open_tokens",
    "rate",
    "uploads",
    "deadlines",
    "models",
    "fed_bytes",
    "epoch",
    "work",
    "workers",
    "retiring",
)
_JOB = ("job", "live", "done", "parts", "part_index", "shards")
_MODEL = (
    "requests",
    "suspects",
    "leases",
    "owners",
    "running",
    "alone",
    "kills",
    "attempts",
    "drain",
    "reaped",
    "turns",
    "given",
)

Argument = str | int | float | bytes


def connect(url: str, timeout_seconds: float = 5) -> redis.Redis:
    """Return a client that answers or fails within seconds; raises RedisUnreachable.

    It repeats what lost its connection or timed out, the latter once: every script bears that.
    """
    client: redis.Redis = redis.Redis.from_url(
        url,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        socket_keepalive=True,
        health_check_interval=10,
        retry=Bounded(2 * timeout_seconds),
        retry_on_error=[redis.exceptions.ConnectionError, redis.exceptions.TimeoutError],
    )
    try:
        client.ping()
    except redis.exceptions.RedisError as error:
        client.close()
        raise errors.RedisUnreachable(url=without_password(url), reason=error) from None
    return client


class Keys:
    """The names of all keys of a namespace. One hash tag, so that a script may use them together."""

    def __init__(self, namespace: str) -> None:
        self._prefix = f"{{{namespace}}}:"
        self._global = [self._prefix + name for name in _GLOBAL]

    def name(self, kind: str, *rest: str | int) -> str:
        return self._prefix + ":".join((kind, *map(str, rest)))

    def of(self, *, job: str | None = None, model: str | None = None, token: str | None = None) -> list[str]:
        """Return the keys of a script that works on this job, this model's requests, this claim."""
        keys = list(self._global)
        if job:
            keys += [self.name(kind, job) for kind in _JOB]
        if model:
            keys += [self.name(kind, model) for kind in _MODEL]
            keys += [self.name("queue", model, bound) for bound in buckets.BOUNDS]
        if token:
            keys.append(self.name("claims", token))
        return keys


class OtherModel(Exception):
    """The job's requests lie under another fingerprint than the one given."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.fingerprint = fingerprint


class Scripts:
    """The scripts by name. Their refusals become errors: LeaseLost, Conflict, OtherModel."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._scripts = {name: client.register_script(body) for name, body in sources().items()}

    def look(self, asked: Sequence[tuple[str, str]]) -> list[Any]:
        """Return the answers to (command, key)..., all of one moment."""
        if not asked:
            return []
        commands, names = zip(*asked, strict=True)
        return list(self.run("look", names, *commands))

    def run(self, name: str, keys: Sequence[str], *args: Argument) -> Any:
        """Run a script; its first argument is the job it is about, if any."""
        try:
            return self._scripts[name](keys=keys, args=args)
        except redis.exceptions.ResponseError as error:
            reason, _, rest = str(error).partition(" ")
            if reason == "LEASELOST":
                raise errors.LeaseLost(what=f"the unit of {args[0]!s}") from None
            if reason == "ILLEGAL":
                before, _, after = rest.partition(" ")
                raise errors.Conflict(f"Job {args[0]!s} is {before}: it cannot become {after}.") from None
            if reason == "OTHERMODEL":
                raise OtherModel(rest) from None
            if "OOM command not allowed" in str(error):  # Redis 6 hides the code behind where it happened
                raise redis.exceptions.OutOfMemoryError(str(error)) from None
            raise


def sources() -> dict[str, str]:
    """Return the body of each script: the prelude and its section."""
    folder = resources.files("jobs")
    _, prelude = folder.joinpath("ledger.lua").read_text().split("--@ prelude\n")
    bodies = {}
    for file in ("ledger_jobs.lua", "ledger_requests.lua", "ledger_tenants.lua", "ledger_fleet.lua"):
        for section in folder.joinpath(file).read_text().split("--@ ")[1:]:
            name, _, body = section.partition("\n")
            bodies[name] = prelude + body
    return bodies
