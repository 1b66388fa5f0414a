"""What goes into an engine and comes out of it."""

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from worker.engine.choices import Family

FinishReason = Literal["stop", "length", "cancelled", "error"]
Kernels = Literal["auto", "native", "torch"]
Task = Literal["auto", "generate", "embed"]
Compile = Literal["auto", "on", "off"]
Attention = Literal["auto", "flash", "dense"]
Speculate = Literal["off", "lookup", "draft"]
Quantize = Literal["int4", "int8"]
QuantizeMethod = Literal["sampled", "rtn"]
QuantizeHead = Literal["auto", "keep", "int8"]
_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0 and `min_p` 0 keep every token. `seed` (any integer) and
    the position alone decide a draw. `stop` strings end the text before themselves; neither they nor the
    end-of-sequence token end it before `min_tokens`, and with `ignore_eos` the latter never does. `n` choices
    are made of one prompt, each with a seed of its own.

    `logit_bias` (token id, bias) is added to the logits. A logit of a token that was sampled before loses
    `presence_penalty` once and `frequency_penalty` as often as it was; one of a token that was sampled or is
    in the prompt is divided by `repetition_penalty` if positive, else multiplied (Keskar et al. 2019).
    `grammar` is what the output must be, in llguidance's Lark dialect.

    `logprobs` asks for the log probability of each token under the model's own logits, and of so many of the
    most probable ones; `prompt_logprobs` for the same of the prompt's tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: str | None = None

    @property
    def greedy(self) -> bool:
        """Whether the highest logit decides. Below this temperature, dividing by it overflows."""
        return self.temperature < _GREEDY_TEMPERATURE

    def fault(self) -> str | None:
        """Return what is wrong with these values in one line, or None."""
        if self.max_tokens < 1:
            return f"max_tokens must be at least 1, not {self.max_tokens}"
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            return f"temperature must be a number >= 0, not {self.temperature}"
        if not 0 < self.top_p <= 1:
            return f"top_p must be in (0, 1], not {self.top_p}"
        if self.top_k < 0:
            return f"top_k must be >= 0 (0: off), not {self.top_k}"
        if not 0 <= self.min_p <= 1:
            return f"min_p must be in [0, 1], not {self.min_p}"
        if "" in self.stop:
            return "a stop string must not be empty"
        if self.n < 1:
            return f"n must be at least 1, not {self.n}"
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            return f"repetition_penalty must be a number > 0, not {self.repetition_penalty}"
        if not all(map(math.isfinite, (self.presence_penalty, self.frequency_penalty))):
            return "presence_penalty and frequency_penalty must be numbers"
        if not all(math.isfinite(bias) for _, bias in self.logit_bias):
            return "each logit_bias must be a number"
        if self.logprobs is not None and self.logprobs < 0:
            return f"logprobs must be >= 0, not {self.logprobs}"
        return None


@dataclass(frozen=True)
class Request:
    """One prompt to continue. `id` is unique among the requests that an engine holds."""

    id: str
    prompt_ids: list[int]
    sampling: Sampling
    root: str = ""
    """Prefixes are shared only among requests of one root, such as a tenant."""
    job: str = ""
    """Requests of one job are expected to have outputs of like lengths."""


@dataclass(frozen=True)
class EmbeddingRequest:
    """One or more texts to embed, each as token ids. `id` as in a Request."""

    id: str
    inputs: tuple[list[int], ...]


@dataclass(frozen=True)
class Timings:
    """When a request was admitted to the running batch, had its first token, and finished (monotonic)."""

    admitted: float
    first_token: float | None
    finished: float


@dataclass(frozen=True)
class TokenLogprobs:
    """The natural log probability of a token, and the most probable tokens with theirs, highest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """What became of a request.

    `token_ids` are all sampled tokens, also those that end it or make up a stop string, which `text` does not
    have; `logprobs` has one entry for each. `cached_tokens` is how many prompt tokens were not computed
    because another request shared them. `prompt_logprobs` has an entry for each token of the prompt, the
    first None. `draft_tokens` were guessed for all choices, `draft_tokens_accepted` of them right.
    `padding_tokens` were computed beside its prompts for nothing (None: the engine pads nothing).
    `others` are the choices after the first, in the order of their index. `embeddings` has a vector for each
    input of an embedding request. `error` is one line, set only with finish_reason "error":
    no choice counts.
    """

    id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    cached_tokens: int | None
    timings: Timings
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embeddings: list[list[float]] | None = None
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    padding_tokens: int | None = None
    others: "tuple[Completion, ...]" = ()

    @property
    def choices(self) -> "tuple[Completion, ...]":
        """All choices of the request, in the order of their index."""
        return (self, *self.others)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs.

    `device` auto, cpu, cuda, cuda:0, ...; `dtype` a name, or auto: float32 on a CPU, on a GPU half precision
    (the model's own if it has one); `max_running` requests and `max_batch_tokens` tokens in one batch, but a
    larger request runs alone (None: as memory allows, in the fallback 65,536); `context_tokens` None reads it
    from the model; `revision` of a hub source; `trust_remote_code` runs Python that comes with the model;
    `pickle_weights` also loads weights that are no safetensors.

    The fallback counts padding and expected outputs among the tokens of a batch; the fast engine counts, when
    a request is to join, prompts and what is sampled by then, and shared prefixes once.

    Of the fast engine: a request waits for company for at most `max_queue_delay_seconds`, and less when the
    running batch can become one of `preferred_batch_sizes` or `max_running`; `kv_memory_bytes` for keys and
    values (None: on a CPU a share of the memory that is free when the model is loaded, on a GPU all that its
    largest step leaves), and `kv_host_bytes` of the host for those that a GPU has no room for;
    `prefill_chunk_tokens` prompt tokens in one step; `prefix_ttl_seconds` after which a prefix that nobody
    uses is forgotten (None: when memory is needed); `share_prefixes` off computes every prompt whole;
    `cascade` off attends to a shared prefix once for each request instead of once for all; `fast` off always
    takes transformers' `generate`; `kernels` auto compiles our own for a CPU where it can, native refuses to
    load without, torch never does.

    On a GPU: `attention` flash has pages and flash-attn, or refuses to load, dense torch's own attention, and
    auto flash where it can; `cuda_graphs` records decode steps over pages; `run_ahead` launches the next
    decode step before the tokens of the last one are read.

    `speculate` lookup drafts what followed the last tokens when they came before in prompt or output, draft
    has a `draft_model` (a source) of the same vocabulary guess, with `draft_kv_memory_bytes` for its keys and
    values: while fewer than `speculate_below` requests run, and at most `speculate_tokens` tokens each.

    `task` auto does what the model can: a causal LM generates and embeds, others embed; generate and embed
    ask for one alone. `tf32` lets a GPU round the factors of float32 products to 10 bits. `compile` has
    what a layer does between products compiled by torch: auto on a GPU that has Triton, on also on a CPU.
    `quantize` rounds the weights of a model's layers to int4 or int8 in groups of `quantize_group`, by the
    `quantize_method` sampled or rtn; `quantize_head` int8 rounds the head, too, auto does on a CPU.

    An embedding batch has `prefill_chunk_tokens`, and more on a fast device.
    Raises ValueError for what no engine can run with.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_running: int = 64
    max_batch_tokens: int | None = None
    context_tokens: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    pickle_weights: bool = False
    max_queue_delay_seconds: float = 0.0
    preferred_batch_sizes: tuple[int, ...] = ()
    kv_memory_bytes: int | None = None
    prefill_chunk_tokens: int = 512
    prefix_ttl_seconds: float | None = None
    share_prefixes: bool = True
    cascade: bool = True
    fast: bool = True
    kernels: Kernels = "auto"
    task: Task = "auto"
    tf32: bool = False
    compile: Compile = "auto"
    attention: Attention = "auto"
    cuda_graphs: bool = True
    run_ahead: bool = True
    kv_host_bytes: int = 0
    speculate: Speculate = "off"
    speculate_tokens: int = 10
    speculate_below: int = 8
    draft_model: str | None = None
    draft_kv_memory_bytes: int = 256 << 20
    quantize: Quantize | None = None
    quantize_group: int = 64
    quantize_method: QuantizeMethod = "sampled"
    quantize_head: QuantizeHead = "auto"

    def __post_init__(self) -> None:
        counts = (
            *("max_running", "prefill_chunk_tokens", "max_batch_tokens", "kv_memory_bytes"),
            *("speculate_tokens", "speculate_below", "draft_kv_memory_bytes"),
        )
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("max_queue_delay_seconds", "prefix_ttl_seconds", "kv_host_bytes"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be >= 0, not {value}")
        choices = {"kernels": Kernels, "task": Task, "compile": Compile, "attention": Attention}
        choices |= {"speculate": Speculate, "quantize_method": QuantizeMethod, "quantize_head": QuantizeHead}
        choices |= {"quantize": Quantize} if self.quantize is not None else {}
        if self.quantize_group not in (32, 64, 128):
            raise ValueError(f"quantize_group must be 32, 64 or 128, not {self.quantize_group}")
        for name, known in choices.items():
            if getattr(self, name) not in get_args(known):
                among = ", ".join(get_args(known))
                raise ValueError(f"{name} must be one of {among}, not {getattr(self, name)!r}")
        if any(size < 1 for size in self.preferred_batch_sizes):
            raise ValueError(
                f"preferred_batch_sizes must be at least 1 each, not {self.preferred_batch_sizes}"
            )


@dataclass
class Stats:
    """What an engine has done since it was loaded: counters, which tests assert on, and seconds."""

    requests_added: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    batches: int = 0
    prefill_tokens_computed: int = 0
    prefix_tokens_reused: int = 0
    prefix_tokens_restored: int = 0
    """Tokens whose KV was copied back from host memory; those of a prompt are among the reused ones."""
    padding_tokens: int = 0
    decode_steps: int = 0
    tokens_sampled: int = 0
    out_of_memory_splits: int = 0
    batches_failed: int = 0
    """Batches that raised and whose rows ran again one by one."""
    batches_cut: int = 0
    """Batches that grew to their limits; what was unfinished went on in smaller ones, computed again."""
    padding_differs: int = 0
    """1 when padded rows of this model differ from single ones, so that batches have one length."""
    batches_differ: int = 0
    """1 when even rows of one length differ, so that each runs alone."""
    fallbacks: int = 0
    """1 when the fast engine cannot run this model, so that `generate` does."""
    native_kernels: int = 0
    """1 when products and attention run on the compiled kernels."""
    int_fallbacks: int = 0
    """Products with integers that dequantise their weight each time, as no faster way takes it, or that torch
    computes as Marlin is installed and fails.
    """
    compile_fallbacks: int = 0
    """Functions that torch did not compile, so that they run as they are."""
    dense_fallbacks: int = 0
    """1 when torch's own attention serves a GPU because flash-attn cannot."""
    plain_attention: int = 0
    """1 when torch's own attention on this GPU is not what it should be, so that plain products do it."""
    steps: int = 0
    steps_below_8: int = 0
    """Steps that decode for fewer than 8 running requests while none waits: the tail."""
    graphs_recorded: int = 0
    graph_steps: int = 0
    """Decode steps that a recorded graph ran."""
    graphs_refused: int = 0
    """Shapes of decode steps that no graph is recorded of: one too many, too large, or it failed."""
    graph_padding_rows: int = 0
    steps_ahead: int = 0
    """Steps launched before the tokens of the last one were read."""
    step_seconds: float = 0.0
    scheduling_seconds: float = 0.0
    """Of `step_seconds`, all that is not the model's forward or the choice of tokens."""
    attention_calls: int = 0
    preemptions: int = 0
    tokens_recomputed: int = 0
    kv_bytes_in_use: int = 0
    kv_bytes_budget: int = 0
    """What `kv_bytes_in_use` may become; 0: not known."""
    kv_host_bytes_in_use: int = 0
    kv_host_evictions: int = 0
    """Prefixes that host memory had no more room for."""
    speculative_steps: int = 0
    """Steps that computed drafts."""
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    draft_kv_bytes_in_use: int = 0
    embeddings_made: int = 0
    embedding_seconds: float = 0.0

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(eq=False)
class Row:
    """A request inside an engine, and how far it is."""

    request: Request
    family: "Family | None" = None
    """The request with several choices that it is one of."""
    admitted: float = 0.0
    first_token: float | None = None
    token_ids: list[int] = field(default_factory=list)
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    padding_tokens: int | None = None
    dropped: bool = False
    """Cancelled or replaced: whatever still comes of it is thrown away."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def request_id(self) -> str:
        """The id of the request it was added as."""
        return self.request.id if self.family is None else self.family.request.id

    @property
    def request_runs(self) -> bool:
        """Whether it, or another choice of its request, was admitted before."""
        return any(row.admitted for row in ([self] if self.family is None else self.family.rows))

    @property
    def tokens(self) -> int:
        """Its length by now: prompt and sampled tokens."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.token_ids)

    @property
    def max_tokens(self) -> int:
        return self.request.sampling.max_tokens
