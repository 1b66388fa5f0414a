"""The engine: token ids in, token ids out. Importing this package loads neither torch nor transformers."""

from jobs import tokens
from jobs.settings import ModelSettings, Settings
from worker.engine.base import Engine
from worker.engine.types import (
    Completion,
    EmbeddingRequest,
    EngineConfig,
    Request,
    Sampling,
    Stats,
    Timings,
    TokenLogprobs,
)

__all__ = [
    "Completion",
    "EmbeddingRequest",
    "Engine",
    "EngineConfig",
    "Request",
    "Sampling",
    "Stats",
    "Timings",
    "TokenLogprobs",
    "follow_engine",
    "open_engine",
]


def open_engine(name: str, model: ModelSettings, settings: Settings) -> Engine:
    """Load the engine of a served model; raises errors.ModelUnavailable."""
    config = _config(model, settings)
    if model.engine == "echo":
        from worker.engine.echo import EchoEngine

        return EchoEngine.open(model.source, config, faults=model.faults, name=name)
    tokens.import_transformers()
    if model.engine == "vllm":
        from worker.engine.vllm_engine import VllmEngine

        return VllmEngine.open(model.source, config, name)
    from worker.engine import opening

    return opening.open_model(model.source, config, name)


def follow_engine(name: str, model: ModelSettings, settings: Settings) -> None:
    """Run this rank's share of a served model until rank 0 stops; raises as `opening.follow_model` does."""
    tokens.import_transformers()
    from worker.engine import opening

    opening.follow_model(model.source, _config(model, settings), name)


def _config(model: ModelSettings, settings: Settings) -> EngineConfig:
    return EngineConfig(
        device=settings.device,
        dtype=model.dtype,
        max_running=settings.max_running,
        max_batch_tokens=settings.max_batch_tokens,
        max_queue_delay_seconds=settings.max_queue_delay_seconds,
        preferred_batch_sizes=settings.preferred_batch_sizes,
        context_tokens=model.context_tokens,
        kv_memory_bytes=settings.kv_memory_bytes,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        prefix_ttl_seconds=settings.prefix_ttl_seconds,
        share_prefixes=settings.share_prefixes,
        kernels=settings.kernels,
        tf32=settings.tf32,
        compile=settings.compile,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        pickle_weights=model.pickle_weights,
        task=model.task,
        speculate=settings.speculate,
        speculate_tokens=settings.speculate_tokens,
        speculate_below=settings.speculate_below,
        draft_model=model.draft_model,
        draft_kv_memory_bytes=settings.draft_kv_memory_bytes,
    )
