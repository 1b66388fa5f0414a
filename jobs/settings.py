"""The one settings class of a process: fields are read from LONGHAUL_<NAME>, unknown names are an error."""

import difflib
import os
import re
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
)
from pydantic_settings import SettingsConfigDict

from jobs import errors, masking
from jobs.engine_settings import EngineSettings
from jobs.masking import without_password
from jobs.model_settings import ModelSettings, Name
from jobs.scale_settings import ScaleSettings
from jobs.telemetry_settings import TelemetrySettings

PREFIX = "LONGHAUL_"
# What the command line client reads; a shell that has them set may start servers too.
URL_VARIABLE = "LONGHAUL_API_URL"
CLIENT_VARIABLES = frozenset({URL_VARIABLE, "LONGHAUL_API_KEY"})
_REMOVED = {"LONGHAUL_API_KEYS": "The store keeps hashes of keys now: longhaul keys create TENANT"}
Tenant = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


class Quota(BaseModel):
    """What a tenant may have at a time. What is not set is not limited."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    open_requests: int | None = Field(
        None, gt=0, description="Requests of unfinished jobs that are not finished themselves."
    )
    open_tokens: int | None = Field(
        None,
        gt=0,
        description="Tokens of their prompts; until a job is planned, a quarter of its file's bytes.",
    )
    file_bytes: int | None = Field(None, gt=0, description="Bytes of files, results included.")
    requests_per_minute: int | None = Field(
        None, gt=0, description="Calls of the API; a minute's calls may come at once."
    )


class Settings(EngineSettings, ScaleSettings, TelemetrySettings):
    """Everything a Longhaul process can be told, with units in the names."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="The Redis of ledger and Celery.")
    namespace: str = Field("longhaul", pattern=r"^[a-z0-9-]+$", description="Prefix of every Redis key.")
    store_url: str = Field("file://./longhaul-store", description="s3://bucket[/prefix] or file://directory.")
    s3_endpoint_url: str | None = Field(None, description="Endpoint of an S3-compatible store; None is AWS.")
    s3_region: str = Field("us-east-1", description="Region of the bucket.")
    s3_access_key_id: str | None = Field(None, description="None: where AWS's own tools look for keys.")
    s3_secret_access_key: SecretStr | None = Field(None, description="Goes with the key id.")
    s3_timeout_seconds: float = Field(
        60,
        gt=0,
        description="A call to the store that is silent for so long is made again; in the API after 10 s.",
    )

    models: dict[Name, ModelSettings] = Field(
        {}, description="What this deployment serves: name -> model (JSON)."
    )
    model: str | None = Field(
        None,
        description="The model this worker runs; None is the only one, 'none' is control work alone. Several"
        " (a,b), or 'all': it loads one at a time and swaps (docs/scaling.md).",
    )

    quotas: dict[Tenant | Literal["*"], Quota] = Field(
        {}, description="tenant -> quota (JSON); `*` is everybody who is not named."
    )
    lease_seconds: float = Field(
        30, gt=0, description="A worker not heard of for this long loses its requests."
    )
    heartbeat_seconds: float = Field(5, gt=0, description="How often leases are extended.")
    poll_seconds: float = Field(
        1, gt=0, description="How often an idle worker looks for work without being woken."
    )
    reap_seconds: float = Field(
        3, gt=0, description="How often expired leases, jobs and lost units are looked for."
    )
    drain_seconds: float = Field(
        25,
        gt=0,
        description="How long a worker told to stop may take. Requests run for the first 70 % of it; the rest"
        " is for writing what is finished, and what is not is given back.",
    )
    swap_share: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Most of its time that a worker of several models spends on leaving busy ones for others:"
        " less makes longer turns. At 0.1 a turn is nine times as long as a swap took.",
    )
    exit_when_idle_seconds: float | None = Field(
        None,
        ge=0,
        description="A worker that has had no request and no unit for so long, and for none of whose models"
        " anything waits, nor a job to be planned or finalized, ends with exit code 0; None: it stays.",
    )

    step_timeout_seconds: float = Field(
        900,
        ge=0,
        description="A worker whose engine is in one step for longer ends itself with exit code 70; 0: never."
        " No honest step may take so long: think of long prompts in the fallback engine on a CPU.",
    )

    collective_timeout_seconds: float = Field(
        300,
        gt=0,
        description="Of a model that torchrun spreads over several GPUs: a rank that waits for another within"
        " a step for longer ends the worker.",
    )

    max_requests_per_job: int = Field(50_000, gt=0, description="More lines than this fail the job.")
    max_file_bytes: int = Field(200_000_000, gt=0, description="Largest file that can be uploaded.")
    max_line_bytes: int = Field(10_000_000, gt=0, description="Longest line of an input file.")
    max_inline_bytes: int = Field(
        20_000_000, gt=0, description="Largest body of POST /v1/batches, which is held in memory."
    )
    upload_idle_seconds: float = Field(
        30,
        gt=0,
        description="A request of which no byte arrives for this long, or after that fewer than 1000 bytes a"
        " second, is refused with 408; one whose head is not complete by then is cut off.",
    )
    default_max_tokens: int | None = Field(
        None, gt=0, description="Output limit of a request that names none; None: the rest of the context."
    )

    plan_window_requests: int = Field(
        50_000, gt=0, description="Requests sorted together and released to feed at once."
    )
    shard_requests: int = Field(512, gt=0, description="Requests per plan shard.")
    feed_window_requests: int = Field(4096, gt=0, description="Most requests of one job in Redis at a time.")
    feed_budget_bytes: int = Field(
        256_000_000, gt=0, description="Most bytes of prompts in Redis at a time, over all jobs."
    )
    scratch_dir: Path = Field(Path(tempfile.gettempdir()), description="Where sorts spill to disk.")

    flush_seconds: float = Field(
        2, gt=0, description="Finished requests are written to a part at least this often."
    )
    flush_bytes: int = Field(4_000_000, gt=0, description="... or when this many bytes have gathered.")
    finished_job_seconds: float = Field(
        3600, gt=0, description="How long Redis remembers a finished job; the store keeps it."
    )
    sweep_seconds: float = Field(
        3600,
        gt=0,
        description="How often expired files and what was left behind are removed from the store, by one"
        " process of all.",
    )
    cost_per_hour: float | None = Field(None, ge=0, description="Price of one worker-hour, for summary.json.")

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            whole = parts.scheme in ("redis", "rediss", "unix") and parts.port != 0 and "@" not in parts.path
        except ValueError:
            whole = False
        if not whole:  # the value is not shown: it may hold a password
            raise ValueError(
                "it must be redis://[user:password@]host[:port][/db], rediss:// or unix://;"
                " in the password / is written %2F, and @ is %40"
            )
        return url

    @classmethod
    def load(cls, **overrides: Any) -> "Settings":
        """Read the environment; raise SettingsError that names the variable to change."""
        known = {PREFIX + name.upper() for name in cls.model_fields}
        for name in sorted(os.environ):
            if name.startswith(PREFIX) and name not in known | CLIENT_VARIABLES:
                if name in _REMOVED:
                    raise errors.SettingsError(f"{name} is no setting any more. {_REMOVED[name]}")
                close = difflib.get_close_matches(name, known, 3) or sorted(known)
                raise errors.SettingsError(f"{name} is not a setting. Did you mean {' or '.join(close)}?")
        try:
            return cls(**overrides)
        except (ValidationError, ValueError) as error:
            raise errors.SettingsError(_readable(error)) from None

    @cached_property
    def served(self) -> tuple[str, ...]:
        """The names of the models this worker runs, in order; none when it serves control alone."""
        if self.model == "none":
            return ()
        if self.model is None:
            if len(self.models) != 1:
                raise errors.SettingsError(
                    f"LONGHAUL_MODEL must name some of {self._names}, or be 'all' or 'none'."
                )
            return tuple(self.models)
        if self.model in self.models:  # also one whose name has a comma
            return (self.model,)
        if self.model == "all" and self.models:
            return tuple(self.models)
        names = tuple(dict.fromkeys(name.strip() for name in self.model.split(",")))
        for name in names:
            if name not in self.models:
                raise errors.SettingsError(f"LONGHAUL_MODEL: {name!r} is not in {self._names}.")
        return names

    def shown(self) -> dict[str, Any]:
        """Return the settings as JSON values without secrets, to be logged."""
        urls = {
            "redis_url": self.redis_url,
            "store_url": self.store_url,
            "s3_endpoint_url": self.s3_endpoint_url,
        }
        shown = {name: url and without_password(url) for name, url in urls.items()}
        return self.model_dump(mode="json") | shown

    def model_post_init(self, _: Any, /) -> None:
        """Have the secrets masked wherever they may come up."""
        secret = self.s3_secret_access_key
        masking.learn(
            [secret.get_secret_value() if secret else None],
            [self.redis_url, self.store_url, self.s3_endpoint_url],
        )

    @property
    def _names(self) -> str:
        return f"LONGHAUL_MODELS ({', '.join(self.models) or 'empty'})"

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """name -> fingerprint of every served model."""
        return {name: self.completed(model).fingerprint(name) for name, model in self.models.items()}

    def completed(self, model: ModelSettings) -> ModelSettings:
        """Return a model with what it does not say itself about its weights."""
        if model.engine in ("echo", "vllm"):
            return model.model_copy(update={"quantize": "none", "quantize_head": "keep"})
        names = ("quantize", "quantize_group", "quantize_method", "quantize_head")
        return model.model_copy(
            update={name: getattr(self, name) for name in names if getattr(model, name) is None}
        )


def _readable(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        field = re.search(r'value for field "(\w+)"', str(error))
        if field is None:
            return str(error)
        return f"{PREFIX}{field[1].upper()} must be JSON: {error.__cause__}."
    lines = []
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        if "[key]" in where:
            name, where = where[1], where[:1]
            item["msg"], item["type"] = f"{name!a} can be no name here: {_NAMES[where[0]]}", ""
        name = f"{PREFIX}{where[0].upper() if where else ''}{'.'.join(['', *where[1:]])}"
        lines.append(f"{name}: {_told(item, where)}")
    return "; ".join(dict.fromkeys(lines))


_NAMES = {
    "models": "that of a model is printable text, and not 'none'",
    "quotas": "a tenant has small letters, digits and dashes; '*' is everybody else",
}
_PARTS: dict[str, type[BaseModel]] = {"models": ModelSettings, "quotas": Quota}


def _told(item: Any, where: list[str]) -> str:
    known = _PARTS.get(where[0] if where else "")
    if known and item["type"] == "extra_forbidden":
        return f"it has no field of this name. Its fields: {', '.join(known.model_fields)}"
    if known and item["type"] == "model_type":
        return "it must be a JSON object"
    return str(item["msg"]).removeprefix("Value error, ")
