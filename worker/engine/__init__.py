"""The engine: token ids in, token ids out. Importing this package loads neither torch nor transformers."""

import dataclasses
import sys

from jobs import tokens
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
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
    "free_memory",
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


def free_memory() -> None:
    """Give back what closed engines held, so that the next one finds it: to the system, and on a GPU."""
    from worker.engine import heap

    heap.release()
    torch = sys.modules.get("torch")  # an engine without a model has none
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


_ON_GPU = {"max_running": 256, "prefill_chunk_tokens": 2048}
"""What a GPU needs to be busy, in place of the defaults that suit a CPU."""


def follow_engine(name: str, model: ModelSettings, settings: Settings) -> None:
    """Run this rank's share of a served model until rank 0 stops; raises as `opening.follow_model` does."""
    tokens.import_transformers()
    from worker.engine import opening

    opening.follow_model(model.source, _config(model, settings), name)


def _config(model: ModelSettings, settings: Settings) -> EngineConfig:
    model = settings.completed(model)
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    values = {name: getattr(settings, name) for name in names if name in Settings.model_fields}
    said = {name: getattr(model, name) for name in names if name in ModelSettings.model_fields}
    # What a model does not say is as the process has it.
    values |= {name: value for name, value in said.items() if value is not None or name not in values}
    values["quantize"] = None if values["quantize"] == "none" else values["quantize"]
    if model.engine != "echo" and _on_gpu(settings.device):
        values |= {name: value for name, value in _ON_GPU.items() if name not in settings.model_fields_set}
    return EngineConfig(**values)


def _on_gpu(device: str) -> bool:
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
