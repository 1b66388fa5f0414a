"""What an engine counts, as metrics: a table from `Stats`, read at each scrape."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from jobs.metrics.families import Family

COUNTERS = {
    "prefill_tokens_computed": Family(
        "prefill_tokens_total", "counter", "Prompt tokens that were computed, again after a preemption too."
    ),
    "prefix_tokens_reused": Family(
        "prefix_cached_tokens_total", "counter", "Prompt tokens that a shared prefix saved computing."
    ),
    "prefix_tokens_restored": Family(
        "prefix_restored_tokens_total", "counter", "Tokens whose KV was copied back from host memory."
    ),
    "tokens_sampled": Family("generation_tokens_total", "counter", "Tokens that were sampled."),
    "tokens_recomputed": Family(
        "recomputed_tokens_total", "counter", "Tokens computed again after a preemption."
    ),
    "preemptions": Family(
        "preemptions_total", "counter", "Requests that made room for others, to go on later."
    ),
    "padding_tokens": Family(
        "padding_tokens_total", "counter", "Positions computed for nothing: the fallback and encoders pad."
    ),
    "steps": Family("steps_total", "counter", "Steps of the fast engine or vLLM."),
    "decode_steps": Family("decode_steps_total", "counter", "Steps that decoded for some request."),
    "steps_below_8": Family(
        "tail_steps_total", "counter", "Steps that decoded for fewer than 8 while none waited."
    ),
    "steps_ahead": Family(
        "steps_ahead_total", "counter", "Steps launched before the tokens of the last one were read."
    ),
    "batches": Family(
        "batches_total", "counter", "Batches of the fallback, of embeddings, of the echo engine."
    ),
    "batches_cut": Family(
        "batches_cut_total", "counter", "Batches of the fallback that grew to their limits."
    ),
    "batches_failed": Family(
        "batches_failed_total", "counter", "Batches that raised, so that their rows ran one by one."
    ),
    "out_of_memory_splits": Family(
        "out_of_memory_splits_total", "counter", "Steps or batches planned anew, with less in them."
    ),
    "attention_calls": Family("attention_calls_total", "counter", "Calls of attention, one for each layer."),
    "graphs_recorded": Family("graphs_recorded_total", "counter", "Decode steps recorded as CUDA graphs."),
    "graph_steps": Family("graph_steps_total", "counter", "Decode steps that a recorded graph ran."),
    "graphs_refused": Family(
        "graphs_refused_total", "counter", "Shapes of decode steps of which no graph is recorded."
    ),
    "graph_padding_rows": Family(
        "graph_padding_rows_total", "counter", "Rows of recorded steps that were nobody's."
    ),
    "kv_host_evictions": Family(
        "kv_host_evictions_total", "counter", "Prefixes that host memory had no more room for."
    ),
    "speculative_steps": Family("speculative_steps_total", "counter", "Steps that checked drafts."),
    "draft_tokens": Family("draft_tokens_total", "counter", "Tokens that were guessed."),
    "draft_tokens_accepted": Family("draft_tokens_accepted_total", "counter", "Guesses that were right."),
    "embeddings_made": Family("embeddings_total", "counter", "Vectors that were made."),
    "int_fallbacks": Family(
        "int_fallbacks_total", "counter", "Products with integers that dequantise their weight each time."
    ),
    "kv_bytes_in_use": Family(
        "kv_bytes_in_use", "gauge", "Bytes of keys and values, kept prefixes included."
    ),
    "kv_host_bytes_in_use": Family("kv_host_bytes_in_use", "gauge", "The same in host memory."),
    "draft_kv_bytes_in_use": Family("draft_kv_bytes_in_use", "gauge", "The same of the draft model."),
    "native_kernels": Family("native_kernels", "gauge", "1: products and attention run on compiled kernels."),
}
"""The field of `Stats` each is."""

REQUESTS = Family(
    "engine_requests_total",
    "counter",
    "Requests in the engine: added, finished, cancelled, failed.",
    ("model", "event"),
)
FALLBACK = Family(
    "fallback",
    "gauge",
    "Not 0: the engine makes do with something slower. generate: transformers' generate; equal_lengths,"
    " one_row: it cannot pad; compile: so many functions are not compiled; dense_attention, plain_attention:"
    " flash-attn, torch's attention cannot be had.",
    ("model", "kind"),
)
FALLBACKS = {
    "generate": "fallbacks",
    "equal_lengths": "padding_differs",
    "one_row": "batches_differ",
    "compile": "compile_fallbacks",
    "dense_attention": "dense_fallbacks",
    "plain_attention": "plain_attention",
}
STEP = Family(
    "step_seconds",
    "summary",
    "Time in steps, by what took it: model (forward and choice of tokens), scheduling. Count: steps.",
    ("model", "phase"),
)
EMBEDDING = Family("embedding_seconds_total", "counter", "Time spent on embeddings.")
KV_RATIO = Family("kv_usage_ratio", "gauge", "kv_bytes_in_use of what there may be.")
PADDING_RATIO = Family(
    "padding_ratio",
    "gauge",
    "Share of padding in all positions of prompts since the start; absent while nothing was padded.",
)
_EVENTS = ("added", "finished", "cancelled", "failed")
_TOTALS = frozenset(
    [name for name, family in COUNTERS.items() if family.kind == "counter"]
    + [f"requests_{event}" for event in _EVENTS]
    + ["step_seconds", "scheduling_seconds", "embedding_seconds"]
)
FAMILIES = (*COUNTERS.values(), REQUESTS, FALLBACK, STEP, EMBEDDING, KV_RATIO, PADDING_RATIO)


def added(stats: Mapping[str, float], past: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's `Stats` with what engines of the same model counted before it."""
    return {name: value + past.get(name, 0) if name in _TOTALS else value for name, value in stats.items()}


def of(
    model: str, stats: Mapping[str, float] | None, unloaded: Mapping[str, Mapping[str, float]]
) -> Iterator[Metric]:
    """Yield the metrics of an engine whose `Stats` these are, if there is one, and what those of unloaded
    models counted: a turn may begin and end between two scrapes. What an engine cannot know is left out.
    """
    yield from _totals({**unloaded, **({} if stats is None else {model: stats})})
    if stats is not None:
        yield from _present(model, stats)


def _totals(counted: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    if not counted:
        return
    for name, family in COUNTERS.items():
        if family.kind == "counter":
            yield family.of(*(((model,), its[name]) for model, its in counted.items()))
    yield REQUESTS.of(
        *(((model, event), its[f"requests_{event}"]) for model, its in counted.items() for event in _EVENTS)
    )
    yield EMBEDDING.of(*(((model,), its["embedding_seconds"]) for model, its in counted.items()))
    if phases := [phase for model, its in counted.items() for phase in _phases(model, its)]:
        yield STEP.summary(*phases)


def _phases(model: str, stats: Mapping[str, float]) -> Iterator[tuple[tuple[str, str], int, float]]:
    if stats["steps"]:
        scheduling = stats["scheduling_seconds"]
        yield (model, "model"), int(stats["steps"]), stats["step_seconds"] - scheduling
        yield (model, "scheduling"), int(stats["steps"]), scheduling


def _present(model: str, stats: Mapping[str, float]) -> Iterator[Metric]:
    mine = (model,)
    for name, family in COUNTERS.items():
        if family.kind == "gauge":
            yield family.of((mine, stats[name]))
    yield FALLBACK.of(*(((model, kind), stats[name]) for kind, name in FALLBACKS.items()))
    if stats["kv_bytes_budget"]:
        yield KV_RATIO.of((mine, stats["kv_bytes_in_use"] / stats["kv_bytes_budget"]))
    if stats["padding_tokens"]:
        positions = stats["padding_tokens"] + stats["prefill_tokens_computed"]
        yield PADDING_RATIO.of((mine, stats["padding_tokens"] / positions))
