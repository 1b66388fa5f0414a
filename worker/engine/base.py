"""What every engine has in common: requests wait, are admitted, run, and come back as completions."""

import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from worker.engine import choices
from worker.engine.embeddings import embedder
from worker.engine.embeddings import requests as embedding
from worker.engine.embeddings.requests import EmbeddingRow
from worker.engine.types import (
    Completion,
    EmbeddingRequest,
    EngineConfig,
    FinishReason,
    Request,
    Row,
    Stats,
    Timings,
)

_WINDOW_REQUESTS = 1024


class Engine(ABC):
    """Turns token ids into token ids. One thread adds and steps; others may cancel and read the properties.

    `on_admit(ids)` is called before requests first run and returns those that must not: they vanish without a
    completion. Whatever it raises leaves `step` with the requests still waiting.
    While it `expects_more`, waiting requests may be held back for company (max_queue_delay_seconds): whoever
    adds the last one says so by setting it to False, as `generate` does.
    """

    def __init__(self, tokenizer: Any, context_tokens: int, vocabulary: int, config: EngineConfig) -> None:
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self.config = config
        self.stats = Stats()
        self.expects_more = True
        self.on_admit: Callable[[list[str]], Iterable[str]] = lambda ids: ()
        self._embedder: embedder.Embedder | None = None
        self._no_embeddings = "this engine does not embed"
        """Why embedding requests are refused; empty: they are not."""
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._waiting: dict[Row, None] = {}
        self._running: dict[Row, None] = {}
        self._ready: list[Completion] = []
        self._rows: dict[str, list[Row]] = {}
        """The rows of each request that has not ended."""

    @staticmethod
    def load(source: str, config: EngineConfig | None = None) -> "Engine":
        """Load a hub id, a local directory or a GGUF file; raises errors.ModelUnavailable."""
        from worker.engine import opening

        return opening.open_model(source, config or EngineConfig())

    @abstractmethod
    def step(self) -> list[Completion]:
        """Go on for at most about 0.2 s and return what has finished. Raises when the device is lost."""

    @abstractmethod
    def room(self) -> int:
        """Return how many more requests to claim now."""

    @abstractmethod
    def close(self) -> None:
        """Stop and free the model. Requests still here are forgotten."""

    @property
    def progress(self) -> tuple[int, ...] | None:
        """None: every step that returns has got on. Else what is another when it has, since the last one."""
        return None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ready)

    @property
    def waiting(self) -> frozenset[str]:
        """The requests of which something waits. One of several choices may run as well."""
        with self._lock:
            return frozenset(row.request_id for row in self._waiting)

    @property
    def running(self) -> frozenset[str]:
        """The requests of which something runs."""
        with self._lock:
            return frozenset(row.request_id for row in self._running)

    def add(self, requests: Iterable[Request | EmbeddingRequest]) -> None:
        """Queue requests. An id that is here already starts anew; what cannot run comes back as an error."""
        with self._lock:
            for request in requests:
                self.stats.requests_added += 1
                self._drop(request.id)
                rows, reason = self._as_rows(request)
                if reason is None:
                    self._waiting |= dict.fromkeys(rows)
                    self._rows[request.id] = rows
                else:
                    self._ready.append(self._completion(rows[0], "error", error=reason))

    def cancel(self, ids: Iterable[str]) -> None:
        """Stop requests, waiting or running: the next step returns them as cancelled. Ignores unknown ids."""
        with self._lock:
            for id in ids:
                for row in self._drop(id)[:1]:
                    completion = self._completion(row, "cancelled")
                    self._ready.append(dataclasses.replace(completion, id=id))

    def generate(self, requests: Iterable[Request | EmbeddingRequest]) -> Iterator[Completion]:
        """Run requests to their end and yield completions as they finish, in any order."""
        source = iter(requests)
        try:
            while True:
                room = max(0, _WINDOW_REQUESTS - len(self._waiting))
                taken = list(islice(source, room))
                self.expects_more = len(taken) == room
                self.add(taken)
                if not self.has_work:
                    return
                yield from self.step()
        finally:
            self.expects_more = True

    def _forget_all(self) -> None:
        with self._lock:
            for held in (self._waiting, self._running, self._ready, self._rows):
                held.clear()

    def _drop(self, id: str) -> list[Row]:
        """Take all rows of a request out; return them."""
        rows = self._rows.pop(id, [])
        for row in rows:
            self._waiting.pop(row, None)
            self._running.pop(row, None)
            row.dropped = True
        return rows

    def _admit(self, rows: list[Row]) -> list[Row]:
        """Move waiting rows to the running ones, without those that were lost or cancelled meanwhile."""
        if not rows:
            return []
        fresh = list(dict.fromkeys(row.request_id for row in rows if not row.request_runs))
        lost = set(self.on_admit(fresh)) if fresh else ()
        now = time.monotonic()
        admitted = []
        with self._lock:
            for id in lost:
                self.stats.requests_cancelled += bool(self._drop(id))
            for row in rows:
                if row.dropped:
                    continue
                del self._waiting[row]
                row.admitted = now
                self._running[row] = None
                admitted.append(row)
        return admitted

    def _finish(self, row: Row, completion: Completion) -> None:
        with self._lock:
            if row.dropped:
                return
            del self._running[row]
            whole = completion if row.family is None else row.family.take(completion)
            if whole is not None:
                self._drop(whole.id)
                self._ready.append(whole)

    def _take_ready(self) -> list[Completion]:
        with self._lock:
            ready, self._ready = self._ready, []
        for completion in ready:
            if completion.finish_reason == "error":
                self.stats.requests_failed += 1
            elif completion.finish_reason == "cancelled":
                self.stats.requests_cancelled += 1
            else:
                self.stats.requests_finished += 1
        return ready

    def _as_rows(self, request: Request | EmbeddingRequest) -> tuple[list[Row], str | None]:
        """Return the rows of a request, and why it can never run: then it is one row."""
        if isinstance(request, EmbeddingRequest):
            return [EmbeddingRow(request)], self._embedding_refusal(request)
        reason = self._refusal(request)
        return ([Row(request)] if reason else choices.rows_of(request)), reason

    def _embedding_refusal(self, request: EmbeddingRequest) -> str | None:
        if self._no_embeddings:
            return self._no_embeddings
        reason = embedding.fault(request, self.context_tokens)
        if reason is None and not all(_all_below(ids, self._vocabulary) for ids in request.inputs):
            reason = f"an input has token ids outside of the model's {self._vocabulary}"
        return reason

    def _embed(self, others: bool = False, others_seconds: float = 0.0) -> bool:
        """Run a slice of the embedding work, see Embedder.step; False: there is none, or not its turn."""
        if self._embedder is None:
            return False
        with self._lock:
            waiting = [row for row in self._waiting if isinstance(row, EmbeddingRow)]
        finished = self._embedder.step(waiting, self._admit, others, others_seconds)
        for row, completion in finished or ():
            self._finish(row, completion)
        return finished is not None

    def _refusal(self, request: Request) -> str | None:
        """Return why a request can never run. A token id out of range would take its whole batch down."""
        if not request.prompt_ids:
            return "the prompt has no tokens"
        if not _all_below(request.prompt_ids, self._vocabulary):
            return f"the prompt has token ids outside of the model's {self._vocabulary}"
        prompt, output = len(request.prompt_ids), request.sampling.max_tokens
        if prompt + output > self.context_tokens:
            return (
                f"{prompt} prompt tokens and {output} max_tokens exceed the context of {self.context_tokens}"
            )
        if any(not 0 <= id < self._vocabulary for id, _ in request.sampling.logit_bias):
            return f"logit_bias has token ids outside of the model's {self._vocabulary}"
        return request.sampling.fault()

    def _completion(
        self, row: Row, reason: FinishReason, text: str = "", error: str | None = None
    ) -> Completion:
        now = time.monotonic()
        timings = Timings(row.admitted or now, row.first_token, now)
        return Completion(row.id, list(row.token_ids), text, reason, 0, timings, error)


def _all_below(ids: list[int], limit: int) -> bool:
    """Tell whether ids are 0 to `limit` - 1, in half the time that `min` and `max` take."""
    import numpy as np  # importing the package is to be light

    try:
        packed = array("I", ids)
    except OverflowError:
        return False
    return int(np.frombuffer(packed, dtype=np.uint32).max()) < limit
