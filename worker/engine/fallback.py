"""The engine that runs every Hugging Face causal LM: left-padded batches through transformers' `generate`.

`generate` runs one batch at a time in a thread of its own and hands rows over as they finish, so that `step`
returns soon and requests can be added and cancelled meanwhile.
"""

import atexit
import gc
import logging
import queue
import threading
import time
from dataclasses import replace

import torch

from jobs import errors
from worker.engine import batching, device_errors, grammar, loader, padding, running
from worker.engine.base import Engine
from worker.engine.embeddings import engine as embedding_engine
from worker.engine.embeddings.requests import EmbeddingRow
from worker.engine.native import library
from worker.engine.rows import RowState
from worker.engine.types import Completion, EngineConfig, Row

log = logging.getLogger(__name__)
_STEP_SECONDS = 0.2
_CLOSE_SECONDS = 30.0
_BATCH_TOKENS = 65_536


class FallbackEngine(Engine):
    """Batches of like requests, one after the other. Nothing is shared between requests."""

    def __init__(self, loaded: loader.Loaded, config: EngineConfig) -> None:
        super().__init__(loaded.tokenizer, loaded.context_tokens, loaded.vocabulary, config)
        self._loaded = loaded
        self._grammars = grammar.Grammars(loaded.tokenizer, loaded.vocabulary, loaded.eos_ids)
        self._batch_tokens = config.max_batch_tokens or _BATCH_TOKENS
        self._busy = False
        self._lost: BaseException | None = None
        self._closing = threading.Event()
        self._batches: queue.SimpleQueue[list[Row] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[Row, Completion] | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_batches, name="generate", daemon=True)
        self._try_batches()
        self._embedder, self._no_embeddings = embedding_engine.padded(loaded, config, self.stats)
        self._batch_started = self._batch_seconds = 0.0
        self._thread.start()
        # A thread inside torch when the interpreter goes away aborts the process.
        atexit.register(self.close)

    @classmethod
    def open(cls, source: str, config: EngineConfig, name: str | None = None) -> "FallbackEngine":
        """Load a source and try it; raises errors.ModelUnavailable."""
        loaded = loader.load(source, config, name)
        try:
            return cls(loaded, config)
        except Exception as error:  # the first tokens of a model may fail in any way
            reason = f"it does not generate: {type(error).__name__}: {error}".split("\n")[0]
            raise errors.ModelUnavailable(name=name or source, source=source, reason=reason) from error

    @property
    def has_work(self) -> bool:
        # Until a step has seen the end of the batch, no other can start.
        return self._busy or super().has_work

    @property
    def progress(self) -> tuple[int, ...] | None:
        # The batch has a thread of its own: a step returns while that one is stuck.
        stats = self.stats
        return (stats.batches, stats.decode_steps, stats.requests_finished) if self._busy else None

    def room(self) -> int:
        """Return how many requests to claim now: none while a batch runs, because none can join it."""
        if self._busy:
            return 0
        return max(0, self.config.max_running - len(self._waiting))

    def step(self) -> list[Completion]:
        if self._lost is not None:
            raise self._lost
        if not self._busy:
            seconds, self._batch_seconds = self._batch_seconds, 0.0
            if not self._embed(others=bool(self._prompts()), others_seconds=seconds):
                self._start_batch()
        self._collect()
        return self._take_ready()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        self._batches.put(None)
        self._thread.join(_CLOSE_SECONDS)
        self._grammars.close()
        self._forget_all()
        del self._loaded
        self._embedder = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _try_batches(self) -> None:
        self._batches_of, reason = padding.try_batches(self._loaded)
        if self._batches_of is not padding.Batches.PADDED:
            log.warning("each batch will have %s: %s", self._batches_of, reason)
            self.stats.padding_differs = 1
            self.stats.batches_differ = int(self._batches_of is padding.Batches.ONE_ROW)

    def _prompts(self) -> list[Row]:
        with self._lock:
            return [row for row in self._waiting if not isinstance(row, EmbeddingRow)]

    def _start_batch(self) -> None:
        rows = batching.form(self._prompts(), self._limits())
        admitted = self._admit(rows)
        if admitted:
            self._busy = True
            self._batch_started = time.monotonic()
            self._batches.put(admitted)

    def _collect(self) -> None:
        """Take what the batch hands over: wait for the first, then take what else is there."""
        deadline = time.monotonic() + _STEP_SECONDS
        try:
            while self._busy:
                wait = 0.0 if self._ready else max(0.0, deadline - time.monotonic())
                event = self._events.get(timeout=wait) if wait else self._events.get_nowait()
                if event is None:
                    self._busy = False
                    self._batch_seconds = time.monotonic() - self._batch_started
                elif isinstance(event, BaseException):
                    self._lost = event
                    raise event
                else:
                    self._finish(*event)
        except queue.Empty:
            pass

    def _run_batches(self) -> None:
        try:
            with library.disabled(self.config.kernels == "torch"):
                for rows in iter(self._batches.get, None):
                    self._run(rows)
                    self._events.put(None)
        except BaseException as error:  # the thread ends here: whoever steps must hear of it
            self._events.put(error)

    def _run(self, rows: list[Row]) -> None:
        """Run rows to their end, in as many batches as memory asks for."""
        loaded = self._loaded
        states = {row: RowState(row, loaded.tokenizer, loaded.eos_ids, self._grammars) for row in rows}
        one_by_one = False
        while states and not self._closing.is_set():
            limits = replace(self._limits(), rows=1) if one_by_one else self._limits()
            together = [states[row] for row in batching.form(list(states), limits)]
            batch = running.Batch(self._loaded, together, limits, self.stats, self._hand_over, self._closing)
            error = batch.run()
            if error is not None:
                one_by_one = self._recover(error, together) or one_by_one
            left = [state for state in together if not state.done]
            if left and error is None:  # cut at its limits
                self.stats.batches_cut += 1
                log.info("batch cut at its limits", extra={"rows": len(together), "unfinished": len(left)})
            states = {row: state for row, state in states.items() if not (state.done or row.dropped)}

    def _recover(self, error: Exception, together: list[RowState]) -> bool:
        """Make batches smaller when memory was short, fail a lone row that raises; True: run one by one."""
        if device_errors.is_out_of_memory(error) and len(together) > 1:
            _free_memory()
            planned = len(together) * batching.length([state.row for state in together])
            self._batch_tokens = planned // 2
            self.stats.out_of_memory_splits += 1
            log.warning(
                "out of memory: batches get smaller",
                extra={"rows": len(together), "max_batch_tokens": self._batch_tokens},
            )
            return False
        if device_errors.is_lost(error):
            raise error
        line = f"{type(error).__name__}: {error}".split("\n")[0]
        log.error("batch failed", extra={"rows": len(together), "error": line})
        if len(together) > 1:  # one of them may be at fault: the others must not fail with it
            self.stats.batches_failed += 1
            return True
        for state in together:
            if not state.done:
                state.done = True
                self._hand_over(state.row, self._completion(state.row, "error", error=line))
        return True

    def _limits(self) -> batching.Limits:
        rows = 1 if self._batches_of is padding.Batches.ONE_ROW else self.config.max_running
        one_length = self._batches_of is not padding.Batches.PADDED
        return batching.Limits(rows, self._batch_tokens, self.context_tokens, one_length)

    def _hand_over(self, row: Row, completion: Completion) -> None:
        self._events.put((row, completion))


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
