"""Which drafter an engine has, by its config."""

import dataclasses
from typing import Any

from jobs import errors
from worker.engine import guards, loader
from worker.engine.drafts import Drafter, chances
from worker.engine.drafts.lookup import Lookup
from worker.engine.drafts.model import Cost, DraftModel, Limits
from worker.engine.types import EngineConfig


def drafter(loaded: loader.Loaded, config: EngineConfig) -> Drafter | None:
    """Return the drafter of a model, None if it is to have none; raises errors.ModelUnavailable."""
    if config.speculate == "draft":
        return _load(config.draft_model or "", loaded, config)
    return Lookup() if config.speculate == "lookup" else None


def over(draft: loader.Loaded, loaded: loader.Loaded, config: EngineConfig) -> DraftModel:
    """Return a drafter over a loaded draft model; raises ValueError if it is none for this model, and
    guards.Unsupported if the fast engine cannot run it.
    """
    if draft.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise ValueError("a draft model needs the vocabulary of the model it drafts for, and has another one")
    limits = Limits(
        config.draft_kv_memory_bytes,
        config.prefill_chunk_tokens,
        draft.context_tokens,
        draft.vocabulary,
        loaded.vocabulary,
    )
    cost = Cost(
        _parameters(draft.model) / _parameters(loaded.model), chances.fixed_tokens(loaded.device.type)
    )
    return DraftModel(guards.prepare(draft.model), limits, cost)


def _load(source: str, loaded: loader.Loaded, config: EngineConfig) -> DraftModel:
    if not source:
        reason = "LONGHAUL_SPECULATE=draft needs a draft_model"
        raise errors.ModelUnavailable(name="the draft model", source="-", reason=reason)
    own = dataclasses.replace(config, revision=None, context_tokens=None, task="generate")
    draft = loader.load(source, own, "the draft model")
    try:
        return over(draft, loaded, config)
    except (ValueError, guards.Unsupported) as error:
        raise errors.ModelUnavailable(name="the draft model", source=source, reason=str(error)) from error


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
