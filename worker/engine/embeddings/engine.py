"""Which embedder a model gets, and the engine of a model that does nothing but embed."""

import gc
import logging
from collections.abc import Callable

import torch

from worker.engine import compiling, guards, heads, loader
from worker.engine.base import Engine
from worker.engine.embeddings.embedder import Embedder
from worker.engine.embeddings.headless import Headless, ModelEncoder
from worker.engine.embeddings.packed import PackedEncoder
from worker.engine.embeddings.padded import PaddedEncoder
from worker.engine.embeddings.pooling import Pooling
from worker.engine.native import library
from worker.engine.types import Completion, EngineConfig, Request, Stats

log = logging.getLogger(__name__)


class EmbeddingEngine(Engine):
    """Runs a model without its head: an encoder, or a causal LM that is to embed alone."""

    def __init__(self, loaded: loader.Loaded, config: EngineConfig) -> None:
        """Take a loaded model; raises NotImplementedError, or whatever its first forward raises."""
        super().__init__(loaded.tokenizer, loaded.context_tokens, loaded.vocabulary, config)
        self._embedder = Embedder(_encoder(loaded, config, self.stats), config, self.stats)
        self._no_embeddings = ""

    def room(self) -> int:
        return max(0, self.config.max_running - len(self._waiting))

    def step(self) -> list[Completion]:
        self._embed()
        return self._take_ready()

    def close(self) -> None:
        self._forget_all()
        self._embedder = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _refusal(self, request: Request) -> str | None:
        return "this model embeds only: it does not generate (use /v1/embeddings)"


def packed(loaded: loader.Loaded, config: EngineConfig, stats: Stats) -> tuple[Embedder | None, str]:
    """Return the embedder of a model whose attention is ours, beside generation, or why there is none."""
    return _beside(lambda how: PackedEncoder(loaded.model, how), loaded, config, stats)


def padded(loaded: loader.Loaded, config: EngineConfig, stats: Stats) -> tuple[Embedder | None, str]:
    """Return the same of any other model."""
    return _beside(lambda how: PaddedEncoder(loaded, how), loaded, config, stats)


def _beside(
    encoder: Callable[[Pooling], ModelEncoder], loaded: loader.Loaded, config: EngineConfig, stats: Stats
) -> tuple[Embedder | None, str]:
    if config.task == "generate":
        return None, "this model is served to generate only (task)"
    if isinstance(loaded.pooling, str):
        return None, f"this model cannot embed: {loaded.pooling}"
    try:
        return Embedder(encoder(loaded.pooling), config, stats), ""
    except Exception as error:  # a model that cannot embed still generates
        reason = f"this model cannot embed: {type(error).__name__}: {error}".split("\n")[0]
        log.warning("%s", reason)
        return None, reason


def _encoder(loaded: loader.Loaded, config: EngineConfig, stats: Stats) -> ModelEncoder:
    """Return the fastest encoder of a model that only embeds."""
    if isinstance(loaded.pooling, str):
        raise NotImplementedError(loaded.pooling)
    if config.fast and heads.is_causal(loaded.model.config):
        headless = Headless(loaded.model)
        try:
            compiler = compiling.choose(config.compile, loaded.device)
            ready = guards.prepare(headless, compiler=compiler)
            compiler.count_in(stats)
            stats.native_kernels = int(not ready.reads_beyond)
            return PackedEncoder(headless, loaded.pooling)
        except guards.Unsupported as reason:
            log.warning("embeddings by transformers' own attention", extra={"reason": str(reason)})
            stats.fallbacks = 1
    if config.fast and PaddedEncoder.pack(loaded):
        native = library.kernels(loaded.model.dtype, loaded.device) is not None
        stats.native_kernels = int(native)
    return PaddedEncoder(loaded, loaded.pooling)
