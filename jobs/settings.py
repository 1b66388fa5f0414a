"""The one settings class of a process: fields are read from LONGHAUL_<NAME>, unknown names are an error."""

import difflib
import hashlib
import os
import re
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from jobs import errors, masking

PREFIX = "LONGHAUL_"
# What the command line client reads; a shell that has them set may start servers too.
CLIENT_VARIABLES = frozenset({"LONGHAUL_API_URL", "LONGHAUL_API_KEY"})
_REMOVED = {"LONGHAUL_API_KEYS": "The store keeps hashes of keys now: longhaul keys create TENANT"}
Tenant = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Quantized = Literal["int4", "int8"]
QuantizedGroup = Annotated[Literal[32, 64, 128], BeforeValidator(int)]
QuantizeMethod = Literal["sampled", "rtn"]
QuantizedHead = Literal["keep", "int8"]


class ModelSettings(BaseModel):
    """One served model: where it comes from and how it runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(description="Hub id, local directory, or GGUF file.")
    revision: str | None = Field(None, description="Hub revision; None is the default branch.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        "auto", description="Precision of the weights; auto: what suits device and model."
    )
    engine: Literal["auto", "vllm", "echo"] = Field(
        "auto",
        description="What runs it: auto is our own; vllm is vLLM, where that is installed (docs/vllm.md);"
        " 'echo' repeats the prompt: for tests and benchmarks of the system.",
    )
    task: Literal["auto", "generate", "embed"] = Field(
        "auto",
        description="What the model is for: auto lets a causal LM generate and embed, and other models embed;"
        " generate and embed allow one alone.",
    )
    context_tokens: int | None = Field(
        None, gt=0, description="Longest prompt + output; None reads it from the model."
    )
    trust_remote_code: bool = Field(
        False, description="Run the model's own Python code. Only for sources you trust."
    )
    pickle_weights: bool = Field(
        False,
        description="Also load weights that are no safetensors (pytorch_model.bin). Only from sources you"
        " trust.",
    )
    chat_template: str | None = Field(
        None, description="Path of a Jinja file to render chats with; None: the template of the model."
    )
    tool_format: Literal["auto", "hermes", "llama", "none"] = Field(
        "auto",
        description="How the model writes calls of tools; auto: as its chat template has it; none: no tools.",
    )
    reasoning: Literal["auto", "think", "none"] = Field(
        "auto",
        description="think: it reasons up to `</think>` before it answers, which becomes `reasoning_content`;"
        " auto: if its chat template says `</think>`.",
    )
    draft_model: str | None = Field(
        None,
        description="A smaller model of the same vocabulary, as a source, for LONGHAUL_SPECULATE=draft.",
    )
    quantize: Quantized | Literal["none"] | None = Field(
        None, description="As LONGHAUL_QUANTIZE, for this model; none keeps its weights as they are."
    )
    quantize_group: QuantizedGroup | None = Field(None, description="As LONGHAUL_QUANTIZE_GROUP.")
    quantize_method: QuantizeMethod | None = Field(None, description="As LONGHAUL_QUANTIZE_METHOD.")
    quantize_head: QuantizedHead | None = Field(None, description="As LONGHAUL_QUANTIZE_HEAD.")
    faults: tuple[str, ...] = Field(
        (), description="Faults the echo engine injects, such as 'kill:TEXT'. For tests."
    )

    @model_validator(mode="after")
    def _quantizable(self) -> "ModelSettings":
        if self.engine == "vllm" and self.quantization:
            raise ValueError(
                "vLLM takes weights as they come: quantize and quantize_head are for our own engine"
            )
        return self

    def fingerprint(self, name: str) -> str:
        """Return the name of this exact model in queues and prefix roots: other weights, other name."""
        facts = [self.source, self.revision or "", self.dtype, self.engine]
        said = f"-{self.quantize}" if self.quantize in ("int4", "int8") else ""
        digest = hashlib.sha256("\0".join([*facts, *filter(None, [self.quantization])]).encode()).hexdigest()
        return f"{name}@{digest[:12]}{said}"

    @property
    def quantization(self) -> str:
        """What of its weights is rounded, and how; nothing when they are as they come."""
        layers = (self.quantize, self.quantize_group, self.quantize_method)
        said = " ".join(map(str, layers)) if self.quantize in ("int4", "int8") else ""
        return f"{said} head" if self.quantize_head == "int8" else said


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


class Settings(BaseSettings):
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

    models: dict[str, ModelSettings] = Field(
        {}, description="What this deployment serves: name -> model (JSON)."
    )
    model: str | None = Field(
        None,
        description="The model this worker runs; None is the only one, or 'none' for control work alone.",
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
        25, gt=0, description="How long a worker told to stop may finish what it runs."
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

    max_running: int = Field(
        64, gt=0, description="Most requests in the running batch. Unless it is set, 256 on a GPU."
    )
    max_queue_delay_seconds: float = Field(
        0,
        ge=0,
        description="Longest a request waits for company before it runs in the fast engine: larger batches,"
        " later first tokens; 0 starts all at once.",
    )
    preferred_batch_sizes: tuple[PositiveInt, ...] = Field(
        (),
        description="Sizes of the fast engine's running batch for which nobody waits out"
        " max_queue_delay_seconds (JSON list); max_running always is one.",
    )
    max_batch_tokens: int | None = Field(
        None,
        gt=0,
        description="Most tokens, prompts and outputs so far, with which another request joins the running"
        " batch, shared prefixes counted once: shorter steps, fewer at a time. A larger request runs alone."
        " None: as memory allows, and 65536, padding and expected outputs included, in the fallback engine.",
    )
    kv_memory_bytes: int | None = Field(
        None,
        gt=0,
        description="Memory for keys and values, kept prefixes included; None: a quarter of what is free"
        " at the start, on a GPU all that a largest step leaves. An idle worker takes it from the system"
        " ahead of use.",
    )
    kv_host_bytes: int = Field(
        0,
        ge=0,
        description="Host memory for keys and values that a GPU has no room for: prefixes are copied back"
        " instead of computed again, and a request may be longer than the GPU holds.",
    )
    prefill_chunk_tokens: int = Field(
        512,
        gt=0,
        description="Most prompt tokens computed in one step: more make prefill faster, and those who decode"
        " meanwhile wait longer for their next token. Unless it is set, 2048 on a GPU.",
    )
    prefix_ttl_seconds: float | None = Field(
        None,
        gt=0,
        description="How long keys and values of a prefix are kept after its last use, so that later requests"
        " find it computed; None: until their memory is needed.",
    )
    share_prefixes: bool = Field(
        True,
        description="Compute a prefix that requests of one tenant have in common once; false computes every"
        " prompt whole, with the same results.",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0, ...")
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="What a CPU computes with: auto is our own kernels, compiled on the first start, and"
        " torch's where there is no C++ compiler; native refuses to start without; torch never compiles.",
    )
    attention: Literal["auto", "flash", "dense"] = Field(
        "auto",
        description="What attends on a GPU: flash is pages and flash-attn, and refuses to start without;"
        " dense is torch's own attention; auto is flash where it can, else dense, with a log line and a"
        " counter. A CPU has its own.",
    )
    cuda_graphs: bool = Field(
        True,
        description="Record decode steps over pages once for each batch size, and launch each as a whole.",
    )
    run_ahead: bool = Field(
        True,
        description="Launch the next decode step on a GPU before the tokens of the last one are read, with"
        " the same results.",
    )
    tf32: bool = Field(
        False,
        description="Let a GPU round the factors of float32 products to 10 bits of mantissa: several times as"
        " fast, not exact. Half precision does not change.",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compile what a layer does between matrix products (torch.compile): auto on a GPU that"
        " has Triton; on also on a CPU; what does not compile runs as it is, with a log line.",
    )
    speculate: Literal["off", "lookup", "draft"] = Field(
        "off",
        description="How the fast engine guesses next tokens while few requests run, to check several in one"
        " step, with the same results: lookup finds them in prompt and output, draft asks the draft_model.",
    )
    speculate_tokens: int = Field(10, gt=0, description="Most tokens guessed for a request in one step.")
    speculate_below: int = Field(8, gt=0, description="Nothing is guessed while so many requests run.")
    draft_kv_memory_bytes: int = Field(
        256 << 20, gt=0, description="Memory for keys and values of a draft model, on top of kv_memory_bytes."
    )
    quantize: Quantized | None = Field(
        None,
        description="Round the weights of a model's layers to so many bits when it is loaded; the result is"
        " kept on disk (docs/quantization.md). Models of the engines vllm and echo are as they are.",
    )
    quantize_group: QuantizedGroup = Field(
        64, description="How many weights in a row share a scale: fewer are more exact and take more memory."
    )
    quantize_method: QuantizeMethod = Field(
        "sampled",
        description="How weights are rounded: sampled chooses scales by what goes into them while the model"
        " runs over tokens of its own, rtn rounds each to the nearest, which is quicker and worse.",
    )
    quantize_head: QuantizedHead = Field(
        "keep", description="int8 also rounds the head, which makes tokens of the last layer's output."
    )
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
    def served(self) -> str | None:
        """The name of the model this worker runs, or None when it serves control alone."""
        if self.model == "none":
            return None
        if self.model is None:
            if len(self.models) != 1:
                raise errors.SettingsError(f"LONGHAUL_MODEL must name one of {self._names}, or be 'none'.")
            return next(iter(self.models))
        if self.model not in self.models:
            raise errors.SettingsError(f"LONGHAUL_MODEL={self.model!r} is not in {self._names}.")
        return self.model

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


_AUTHORITY = re.compile(r"://.*@")


def without_password(url: str) -> str:
    """Return a URL that may be shown."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return _AUTHORITY.sub("://***@", url)
    if "@" not in parts.netloc and "@" in url:  # a password with a slash that is not quoted
        return _AUTHORITY.sub("://***@", url)
    credentials, at, host = parts.netloc.rpartition("@")
    user, colon, _ = credentials.partition(":")
    query = re.sub(r"(?<=password=)[^&]*", "***", parts.query)
    return urlunsplit(parts._replace(netloc=f"{user}{colon}{'***' if colon else ''}{at}{host}", query=query))


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
            where = where[:2]
            item["msg"], item["type"] = (
                "a tenant has small letters, digits and dashes; '*' is everybody else",
                "",
            )
        name = f"{PREFIX}{where[0].upper() if where else ''}{'.'.join(['', *where[1:]])}"
        lines.append(f"{name}: {_told(item, where)}")
    return "; ".join(dict.fromkeys(lines))


_PARTS: dict[str, type[BaseModel]] = {"models": ModelSettings, "quotas": Quota}


def _told(item: Any, where: list[str]) -> str:
    known = _PARTS.get(where[0] if where else "")
    if known and item["type"] == "extra_forbidden":
        return f"it has no field of this name. Its fields: {', '.join(known.model_fields)}"
    if known and item["type"] == "model_type":
        return "it must be a JSON object"
    return str(item["msg"]).removeprefix("Value error, ")
