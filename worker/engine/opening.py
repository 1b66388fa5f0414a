"""Which engine runs a model: the fast one where its guards allow, else the fallback."""

import logging

from jobs import errors
from worker.engine import (
    attention_flash,
    footprint,
    guards,
    heap,
    kv_budget,
    leading,
    loader,
    packed,
    parallel,
    sizing,
)
from worker.engine.base import Engine
from worker.engine.embeddings.engine import EmbeddingEngine
from worker.engine.fallback import FallbackEngine
from worker.engine.fast import FastEngine
from worker.engine.native import library
from worker.engine.types import EngineConfig

log = logging.getLogger(__name__)


def open_model(source: str, config: EngineConfig, name: str | None = None) -> Engine:
    """Load a source and the best engine for it; raises errors.ModelUnavailable."""
    name = name or source
    heap.keep_freed_memory()
    loaded = loader.load(source, config, name)
    try:
        engine = over(loaded, config, name)
    except errors.ModelUnavailable:  # its draft model
        raise
    except (library.Unavailable, attention_flash.Unavailable) as error:
        kernels = isinstance(error, library.Unavailable)
        reason = f"LONGHAUL_{'KERNELS=native' if kernels else f'ATTENTION={config.attention}'}: {error}"
        raise errors.ModelUnavailable(name=name, source=source, reason=reason) from error
    except sizing.DoesNotFit as error:
        reason = f"{error}{_advice(source, loaded, config)}"
        raise errors.ModelUnavailable(name=name, source=source, reason=reason, advised=True) from error
    except Exception as error:  # the first tokens of a model may fail in any way
        does = "generate" if loaded.generates and config.task != "embed" else "embed"
        reason = f"it does not {does}: {type(error).__name__}: {error}".split("\n")[0]
        raise errors.ModelUnavailable(name=name, source=source, reason=reason) from error
    heap.freeze()
    if isinstance(engine, FastEngine):
        engine.touch_memory()
    return engine


def follow_model(source: str, config: EngineConfig, name: str | None = None) -> None:
    """Load this rank's share of a source and run what rank 0 says, until it says stop.

    Does what `open_model` does with a model, step by step, up to where a team is led.
    Raises errors.ModelUnavailable, guards.Unsupported, sizing.DoesNotFit, or what a step raises.
    """
    team = parallel.current()
    assert team is not None
    loaded = loader.load(source, config, name)
    with library.disabled(config.kernels == "torch"):
        runner = guards.prepare(loaded.model, leading.backend(config.attention, loaded.device))
    kv_budget.of(loaded, config, runner)
    leading.follow(runner, team)


def _advice(source: str, loaded: loader.Loaded, config: EngineConfig) -> str:
    """Return what would fit in place of a model; empty if nothing would, or its config does not tell."""
    team = parallel.current()
    total = kv_budget.Card(loaded.device).total_bytes()
    try:
        need = footprint.of_source(source, config, loaded.model.dtype, 1 if team is None else team.size)
        return sizing.advice(need, total, sizing.Settings(0, config.kv_memory_bytes))
    except Exception as error:  # a model's own code may raise anything; that it does not fit stands
        log.info("no advice on what fits", extra={"reason": str(error)})
        return ""


def over(loaded: loader.Loaded, config: EngineConfig, name: str = "") -> Engine:
    """Return the best engine over a loaded model. Raises what the model raises in the fallback,
    library.Unavailable when it is to run on compiled kernels and cannot, and attention_flash.Unavailable.
    """
    if config.kernels == "native":
        library.require(loaded.model.dtype, loaded.device)
    with library.disabled(config.kernels == "torch"):
        engine = _best(loaded, config, name)
    engine.stats.int_fallbacks = packed.count_plain_integers(loaded.model)
    if config.kernels == "native" and not engine.stats.native_kernels:
        engine.close()
        code = "code" if isinstance(engine, EmbeddingEngine) else "generate"
        raise library.Unavailable(f"transformers' {code}, which runs this model, has none")
    return engine


def _best(loaded: loader.Loaded, config: EngineConfig, name: str) -> Engine:
    if parallel.current() is not None:  # no other engine has its steps run by all ranks
        return FastEngine.over(loaded, config)
    if config.task == "embed" or not loaded.generates:
        return EmbeddingEngine(loaded, config)
    if config.fast:
        try:
            return FastEngine.over(loaded, config)
        except guards.Unsupported as reason:
            if config.attention == "flash":
                raise attention_flash.Unavailable(
                    f"the fast engine cannot run the model: {reason}"
                ) from reason
            log.warning("fallback to transformers' generate", extra={"model": name, "reason": str(reason)})
    if config.speculate == "draft":
        log.warning("the fallback has no use for a draft model", extra={"model": name})
    for _ in packed.pack_integers(loaded.model):
        pass
    engine = FallbackEngine(loaded, config)
    engine.stats.fallbacks = 1
    return engine
