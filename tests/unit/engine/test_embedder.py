"""The embedder over an encoder without a model: what runs with what, and what fails with whom."""

import math
from typing import Any

import pytest

from worker.engine import EmbeddingRequest, Engine, EngineConfig
from worker.engine.embeddings import embedder
from worker.engine.embeddings import requests as embedding
from worker.engine.embeddings.engine import EmbeddingEngine


class Scripted:
    """An encoder without a model, that does what a test says."""

    pads = False
    one_length = False
    most_texts = 100

    def __init__(self, fails: Any = lambda texts: None) -> None:
        self.fails = fails
        self.batches: list[list[list[int]]] = []
        self.lost = False

    def encode(self, texts: list[list[int]]) -> list[list[float]]:
        self.batches.append(texts)
        error = self.fails(texts)
        if error is not None:
            raise error
        return [[math.nan if 13 in text else float(len(text))] for text in texts]

    def is_lost(self, error: Exception) -> bool:
        return self.lost


class ScriptedEngine(EmbeddingEngine):
    def __init__(self, encoder: embedding.Encoder, **fields: Any) -> None:
        config = EngineConfig(**fields)
        Engine.__init__(self, None, 512, 300, config)
        self._no_embeddings = ""
        self._embedder = embedder.Embedder(encoder, config, self.stats)


def run(engine: Engine, **texts: list[list[int]]) -> dict[str, Any]:
    requests = [EmbeddingRequest(id, tuple(each)) for id, each in texts.items()]
    return {c.id: c.error or c.embeddings for c in engine.generate(requests)}


def test_an_input_that_raises_fails_its_request_alone() -> None:
    encoder = Scripted(lambda texts: RuntimeError("bad id\nmore") if [7] in texts else None)
    done = run(ScriptedEngine(encoder), a=[[1], [2]], b=[[7], [3]], c=[[4]])
    assert done == {"a": [[1.0], [1.0]], "b": "RuntimeError: bad id", "c": [[1.0]]}


def test_a_vector_that_is_not_finite_fails_its_request_alone() -> None:
    done = run(ScriptedEngine(Scripted()), a=[[1], [2]], b=[[1], [13]])
    assert done == {"a": [[1.0], [1.0]], "b": "the embedding of input 1 is not finite numbers"}


def test_short_memory_makes_batches_smaller() -> None:
    encoder = Scripted(lambda texts: MemoryError() if sum(map(len, texts)) > 10 else None)
    engine = ScriptedEngine(encoder)
    done = run(engine, a=[[1, 2, 3]] * 8, b=[[4] * 11])
    assert done == {"a": [[3.0]] * 8, "b": "MemoryError: "}
    assert engine.stats.out_of_memory_splits == 2


def test_a_lost_device_is_raised() -> None:
    encoder = Scripted(lambda texts: RuntimeError("gone"))
    encoder.lost = True
    engine = ScriptedEngine(encoder)
    engine.add([EmbeddingRequest("a", ([1],))])
    with pytest.raises(RuntimeError, match="gone"):
        engine.step()


def test_batches_have_like_lengths_within_the_budget_and_the_oldest_goes_first() -> None:
    encoder = Scripted()
    engine = ScriptedEngine(encoder, prefill_chunk_tokens=19, max_batch_tokens=19)
    run(engine, old=[[1] * 9], new=[[2]] * 5 + [[3] * 10] + [[4] * 100])
    lengths = [[len(text) for text in batch] for batch in encoder.batches]
    assert lengths == [[9, 10], [1, 1, 1, 1, 1], [100]]


@pytest.mark.parametrize(
    ("pads", "one_length", "most", "expected"),
    [
        (False, False, 99, slice(0, 5)),
        (True, False, 99, slice(1, 4)),
        (True, True, 99, slice(2, 4)),
        (True, False, 1, slice(2, 3)),
    ],
)
def test_a_batch_is_what_its_model_allows(pads: bool, one_length: bool, most: int, expected: slice) -> None:
    encoder = Scripted()
    encoder.pads, encoder.one_length, encoder.most_texts = pads, one_length, most
    assert embedder.alike([1, 5, 6, 6, 9, 30], 2, 30, encoder) == expected
