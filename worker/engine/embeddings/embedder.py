"""Runs embedding requests: their inputs wait in one pool, sorted by length, and run in batches of like
lengths, a slice of time a step.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable

from worker.engine.embeddings.requests import EmbeddingRow, Encoder, Text
from worker.engine.types import Completion, EngineConfig, Row, Stats

log = logging.getLogger(__name__)
_SLICE_SECONDS = 0.2
_POOL_BATCHES = 16
# More tokens make no product faster, on any device, but take memory.
_MOST_TOKENS = 16_384
# A batch that is a quarter full stays as it is when more would be padding by so much of its tokens.
_MOST_PADDING = 1.1
# Beside requests that generate: these wait for each batch.
_SHARED_TOKENS = 128

Finished = tuple[EmbeddingRow, Completion]


class Embedder:
    """Holds the inputs of admitted embedding requests and runs them.

    It takes turns with the requests that generate: each kind gets half of the time while both have work.
    """

    def __init__(self, encoder: Encoder, config: EngineConfig, stats: Stats) -> None:
        self._encoder = encoder
        self._config = config
        self._stats = stats
        self._pool: list[Text] = []
        self._suspects: list[Text] = []
        """Of a batch that raised: each runs alone, so that the one at fault fails alone."""
        self._arrivals = 0
        self._most = config.max_batch_tokens or max(_MOST_TOKENS, config.prefill_chunk_tokens)
        self._tried = 0
        self._rate = 0.0
        self._owed = 0.0

    def step(
        self,
        waiting: list[EmbeddingRow],
        admit: Callable[[list[Row]], Iterable[Row]],
        others: bool = False,
        others_seconds: float = 0.0,
    ) -> list[Finished] | None:
        """Run a slice of the work and return what is done or has failed; None: no work, or not its turn.

        `others` tells whether generation has work too, `others_seconds` how long that ran since the last
        call. What `admit` raises leaves all as it was.
        """
        self._sweep()
        if not (waiting or self._pool or self._suspects) or not self._is_due(others, others_seconds):
            return None
        self._refill(waiting, admit)
        started = time.monotonic()
        finished: list[Finished] = []
        seconds = 0.0
        while (self._pool or self._suspects) and seconds < _SLICE_SECONDS / 2:
            finished += self._run(self._next_batch(others))
            seconds = time.monotonic() - started
            self._sweep()
        self._stats.embedding_seconds += seconds
        self._owed -= seconds if others else 0.0
        return finished

    def _is_due(self, others: bool, others_seconds: float) -> bool:
        self._owed = self._owed + others_seconds if others else 0.0
        return not others or self._owed > 0

    def _sweep(self) -> None:
        """Let go of the inputs of rows that are cancelled, replaced or failed."""
        self._pool = [t for t in self._pool if not (t.row.dropped or t.row.failed)]
        self._suspects = [t for t in self._suspects if not (t.row.dropped or t.row.failed)]

    def _refill(self, waiting: list[EmbeddingRow], admit: Callable[[list[Row]], Iterable[Row]]) -> None:
        """Admit rows, oldest first, until there is enough to choose from."""
        tokens = sum(len(text.ids) for text in self._pool)
        rows = len({text.row for text in self._pool})
        fresh: list[Row] = []
        for row in waiting:
            if rows >= self._config.max_running or tokens >= _POOL_BATCHES * self._budget():
                break
            fresh.append(row)
            rows, tokens = rows + 1, tokens + row.tokens
        if not fresh:
            return
        for admitted in admit(fresh):
            assert isinstance(admitted, EmbeddingRow)
            self._arrivals += 1
            self._pool += [Text(admitted, index, self._arrivals) for index in range(len(admitted.inputs))]
        self._pool.sort(key=lambda text: len(text.ids))

    def _budget(self, others: bool = False) -> int:
        """Return how many tokens the next batch may cost: a slice's, but enough for fast products."""
        least = min(_SHARED_TOKENS, self._config.prefill_chunk_tokens) if others else 0
        least = least or self._config.prefill_chunk_tokens
        return min(self._most, max(least, min(int(self._rate * _SLICE_SECONDS), 2 * self._tried)))

    def _next_batch(self, others: bool) -> list[Text]:
        """Take the oldest input and those most like it out of the pool."""
        if self._suspects:
            return [self._suspects.pop()]
        oldest = min(range(len(self._pool)), key=lambda at: self._pool[at].order)
        lengths = [len(text.ids) for text in self._pool]
        chosen = alike(lengths, oldest, self._budget(others), self._encoder)
        batch = self._pool[chosen]
        del self._pool[chosen]
        return batch

    def _run(self, batch: list[Text]) -> list[Finished]:
        lengths = [len(text.ids) for text in batch]
        cost = len(batch) * max(lengths) if self._encoder.pads else sum(lengths)
        started = time.perf_counter()
        try:
            vectors = self._encoder.encode([text.ids for text in batch])
        except Exception as error:  # a model may raise anything
            if self._encoder.is_lost(error):
                raise
            return self._recover(error, batch, cost)
        rate = cost / max(time.perf_counter() - started, 1e-6)
        self._rate = rate if not self._rate else (self._rate + rate) / 2
        self._tried = max(self._tried, cost)
        self._stats.batches += 1
        self._stats.prefill_tokens_computed += sum(lengths)
        self._stats.padding_tokens += cost - sum(lengths)
        if self._encoder.pads:
            for text, length in zip(batch, lengths, strict=True):
                text.row.padding_tokens = (text.row.padding_tokens or 0) + max(lengths) - length
        alone = len(batch) == 1
        return [done for pair in zip(batch, vectors, strict=True) for done in self._take(*pair, alone)]

    def _take(self, text: Text, vector: list[float], alone: bool) -> list[Finished]:
        row = text.row
        if row.failed:
            return []
        if not all(map(math.isfinite, vector)):
            if not alone:  # it may be its neighbours' doing
                self._suspects.append(text)
                return []
            return self._fail(row, f"the embedding of input {text.index} is not finite numbers")
        row.vectors[text.index] = vector
        row.left -= 1
        self._stats.embeddings_made += 1
        return [] if row.left else [(row, row.completion())]

    def _recover(self, error: Exception, batch: list[Text], cost: int) -> list[Finished]:
        """Run a batch in halves when memory was short, else one by one; fail a lone input's row."""
        line = f"{type(error).__name__}: {error}".split("\n")[0]
        if len(batch) == 1:
            log.error(
                "embedding failed", extra={"request": batch[0].row.id, "input": batch[0].index, "error": line}
            )
            return self._fail(batch[0].row, line)
        if isinstance(error, MemoryError):
            self._most = max(1, cost // 2)
            self._stats.out_of_memory_splits += 1
            log.warning("out of memory: embedding batches get smaller", extra={"tokens": self._most})
            self._pool += batch
            self._pool.sort(key=lambda text: len(text.ids))
        else:
            self._stats.batches_failed += 1
            log.warning("embedding batch failed: its inputs run one by one", extra={"error": line})
            self._suspects += reversed(batch)
        return []

    def _fail(self, row: EmbeddingRow, reason: str) -> list[Finished]:
        row.failed = True
        return [(row, row.completion(reason))]


def alike(lengths: list[int], at: int, tokens: int, encoder: Encoder) -> slice:
    """Return which run of ascending lengths, grown from `at` to the nearest ones, makes a batch."""
    first, end, total = at, at + 1, lengths[at]
    while end - first < encoder.most_texts:
        below = lengths[at] - lengths[first - 1] if first else math.inf
        above = lengths[end] - lengths[at] if end < len(lengths) else math.inf
        nearer = min(below, above)
        if nearer == math.inf or (encoder.one_length and nearer):
            break
        down = below < above
        total += lengths[first - 1] if down else lengths[end]
        longest = lengths[end - 1] if down else lengths[end]
        cost = longest * (end - first + 1) if encoder.pads else total
        if cost > tokens or (cost > _MOST_PADDING * total and cost > tokens // 4):
            break
        first, end = (first - 1, end) if down else (first, end + 1)
    return slice(first, end)
