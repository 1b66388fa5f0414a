"""An engine without a model: it repeats the end of each prompt. For tests and benchmarks of the system."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jobs import errors, tokens
from worker.engine.base import Engine
from worker.engine.embeddings import requests as embedding
from worker.engine.embeddings.requests import EmbeddingRow
from worker.engine.source import locate
from worker.engine.types import Completion, EngineConfig, Row, Timings

log = logging.getLogger(__name__)
_NO_LIMIT = 1 << 40
_KINDS = ("kill", "raise", "break", "hang", "memory")


class EchoEngine(Engine):
    """Completes a request with the last tokens of its prompt, up to max_tokens; a step finishes all that run.
    An embedding is a few numbers made of the hash of its input.

    Faults happen when a running prompt contains TEXT: `kill:TEXT` kills the process, `raise:TEXT` makes that
    request an error, `break:TEXT` raises out of the step, `hang:TEXT` never returns from it, not even when
    the engine is closed, `memory:TEXT` takes memory until there is no more (limit the process first!).
    `slow:SECONDS` makes each step so long, `load:SECONDS` the loading. `trace:FILE` is none: it appends the
    id of each request that was computed to a file.
    """

    def __init__(self, tokenizer: Any, config: EngineConfig, faults: Iterable[str] = ()) -> None:
        super().__init__(tokenizer, config.context_tokens or _NO_LIMIT, _NO_LIMIT, config)
        self._no_embeddings = ""
        self._closing = threading.Event()
        self._slow_seconds = self._load_seconds = 0.0
        self._trace: Path | None = None
        self._texts: dict[str, list[str]] = {kind: [] for kind in _KINDS}
        for fault in faults:
            kind, _, value = fault.partition(":")
            if kind == "slow":
                self._slow_seconds = float(value)
            elif kind == "load":
                self._load_seconds = float(value)
            elif kind == "trace" and value:
                self._trace = Path(value)
            elif kind in self._texts and value:
                self._texts[kind].append(value)
            else:
                known = ", ".join(f"{kind}:TEXT" for kind in _KINDS)
                raise ValueError(f"{fault!r} is not a fault: {known}, slow:SECONDS, load:SECONDS, trace:FILE")

    @classmethod
    def open(
        cls, source: str, config: EngineConfig, faults: Iterable[str] = (), name: str | None = None
    ) -> "EchoEngine":
        """Load the tokenizer of a source; raises errors.ModelUnavailable."""
        try:
            opened = cls(_load_tokenizer(source, config), config, faults)
            time.sleep(opened._load_seconds)
            return opened
        except Exception as error:  # as in loader.load
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise errors.ModelUnavailable(name=name or source, source=source, reason=reason) from error

    def room(self) -> int:
        return max(0, self.config.max_running - len(self._waiting))

    def step(self) -> list[Completion]:
        with self._lock:
            first = list(self._waiting)[: self.config.max_running]
        rows = self._admit(first)
        if rows:
            self.stats.batches += 1
            self.stats.decode_steps += 1
            raised = self._inject_faults(rows)
            if self._slow_seconds:
                self._closing.wait(self._slow_seconds)
            self._echo(rows, raised)
        return self._take_ready()

    def close(self) -> None:
        self._closing.set()

    def _echo(self, rows: list[Row], raised: set[str]) -> None:
        if self._trace:
            with self._trace.open("a") as trace:  # one write: several workers may share the file
                trace.write("".join(f"{row.id}\n" for row in rows))
        for row in rows:
            self.stats.prefill_tokens_computed += row.tokens
            row.first_token = time.monotonic()
            if row.id in raised:
                self._finish(row, self._completion(row, "error", error="RuntimeError: an injected fault"))
            elif isinstance(row, EmbeddingRow):
                row.vectors = [embedding.hashed(ids) for ids in row.inputs]
                self.stats.embeddings_made += len(row.inputs)
                self._finish(row, row.completion())
            else:
                self._finish(row, self._repeated(row, row.first_token))

    def _repeated(self, row: Row, now: float) -> Completion:
        output = row.request.prompt_ids[-row.max_tokens :]
        self.stats.tokens_sampled += len(output)
        text = self.tokenizer.decode(output, skip_special_tokens=True)
        return Completion(row.id, output, text, "length", 0, Timings(row.admitted, now, now))

    def _inject_faults(self, rows: list[Row]) -> set[str]:
        """Do what the faults say; return the ids of the rows that must fail."""
        if not any(self._texts.values()):
            return set()
        raised = set()
        for row in rows:
            prompt = self.tokenizer.decode(row.request.prompt_ids, skip_special_tokens=True)
            kinds = [kind for kind in _KINDS if any(text in prompt for text in self._texts[kind])]
            if "kill" in kinds:
                os.kill(os.getpid(), signal.SIGKILL)
            if "memory" in kinds:
                _take_all_memory()
            if "break" in kinds:
                raise RuntimeError("an injected fault")
            while "hang" in kinds:
                time.sleep(60)
            if "raise" in kinds:
                raised.add(row.id)
        return raised


def _take_all_memory() -> None:
    taken = []
    while True:
        taken.append(b"x" * (16 << 20))  # written to, so that it is really taken


def _load_tokenizer(source: str, config: EngineConfig) -> Any:
    file = Path(os.path.expanduser(source)) / "tokenizer.json"
    if file.is_file():
        # transformers would import torch, which an engine without a model does not need.
        import tokenizers

        return tokenizers.Tokenizer.from_file(str(file))
    location, options = locate(source, config)
    tokens.import_transformers()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(location, **options)
