"""The words of embedding: a request as a row, its inputs as texts, and what encodes a batch of these."""

import hashlib
import math
import time
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from worker.engine.types import Completion, EmbeddingRequest, Request, Row, Sampling, Timings

_ECHO_SIZE = 8


class EmbeddingRow(Row):
    """An embedding request inside an engine. Who counts its tokens sees one prompt of all its inputs."""

    def __init__(self, request: EmbeddingRequest) -> None:
        super().__init__(Request(request.id, list(chain(*request.inputs)), Sampling(1)))
        self.inputs = request.inputs
        self.vectors: list[list[float]] = [[] for _ in request.inputs]
        self.left = len(request.inputs)
        self.failed = False

    def completion(self, error: str | None = None) -> Completion:
        """Return its vectors, or why there are none."""
        now = time.monotonic()
        timings = Timings(self.admitted or now, None, now)
        if error is not None:
            return Completion(self.id, [], "", "error", 0, timings, error)
        padding = self.padding_tokens
        return Completion(
            self.id, [], "", "stop", 0, timings, embeddings=self.vectors, padding_tokens=padding
        )


@dataclass(frozen=True, eq=False)
class Text:
    """One input of a row. A smaller `order` came earlier."""

    row: EmbeddingRow
    index: int
    order: int

    @property
    def ids(self) -> list[int]:
        return self.row.inputs[self.index]


class Encoder(Protocol):
    """What turns a batch of texts into vectors, and what its batches may be."""

    pads: bool
    """Whether each text costs as much as the longest of its batch."""
    one_length: bool
    most_texts: int

    def encode(self, texts: list[list[int]]) -> list[list[float]]:
        """Return a vector for each text. Raises MemoryError, or whatever the model raises."""
        ...

    def is_lost(self, error: Exception) -> bool:
        """Tell whether the device is unusable after an error."""
        ...


def fault(request: EmbeddingRequest, context_tokens: int) -> str | None:
    """Return why a request can never run, its token ids apart, or None."""
    if not request.inputs:
        return "there is no input to embed"
    for index, ids in enumerate(request.inputs):
        if not ids:
            return f"input {index} has no tokens"
        if len(ids) > context_tokens:
            return f"input {index} has {len(ids)} tokens, which exceed the context of {context_tokens}"
    return None


def hashed(ids: list[int]) -> list[float]:
    """Return 8 numbers, a vector of length 1, that depend on every id: an embedding without a model."""
    digest = hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=2 * _ECHO_SIZE).digest()
    numbers = [int.from_bytes(digest[i : i + 2]) - 32767.5 for i in range(0, len(digest), 2)]
    length = math.hypot(*numbers)
    return [number / length for number in numbers]
