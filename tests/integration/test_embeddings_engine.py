"""Embeddings of a real model in float32, against transformers' hidden states of each text alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from worker.engine import EmbeddingRequest, Engine, EngineConfig, Request, Sampling, loader, smollm2
from worker.engine.embeddings.engine import EmbeddingEngine
from worker.engine.fallback import FallbackEngine
from worker.engine.fast import FastEngine

LENGTHS = (1, 7, 200, 90, 30, 150, 3, 30)
KINDS = {
    FastEngine: {},
    FallbackEngine: {"fast": False},
    EmbeddingEngine: {"task": "embed", "kernels": "torch"},
}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = EngineConfig(device="cpu", kv_memory_bytes=1 << 28, **KINDS[request.param])  # type: ignore[arg-type]
    engine = Engine.load(str(smollm2.ensure()), config)
    assert isinstance(engine, request.param)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    tokenizer = loader.AutoTokenizer.from_pretrained(smollm2.ensure())
    source = Path(os.__file__).read_text()
    ids: list[int] = tokenizer(source, add_special_tokens=False, verbose=False)["input_ids"]
    return [ids[1000 * i : 1000 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(texts: list[list[int]]) -> Tensor:
    """The normalised last hidden state of each text's last token, from a model that no engine has touched."""
    model = loader.load(str(smollm2.ensure()), EngineConfig(device="cpu"), "reference").model.model
    with torch.inference_mode():
        last = [model(torch.tensor([text])).last_hidden_state[0, -1] for text in texts]
    return F.normalize(torch.stack(last), dim=-1)


@pytest.mark.timeout(300)
def test_vectors_are_those_of_a_plain_forward(
    engine: Engine, texts: list[list[int]], expected: Tensor
) -> None:
    requests = [EmbeddingRequest("several", tuple(texts[:5])), EmbeddingRequest("more", tuple(texts[5:]))]
    done = {c.id: c for c in engine.generate(requests)}
    found = torch.tensor([*(done["several"].embeddings or []), *(done["more"].embeddings or [])])
    assert (found - expected).abs().max() < 1e-5
    assert (1 - F.cosine_similarity(found.double(), expected.double())).max() < 1e-5
    assert engine.stats.embeddings_made == len(LENGTHS)


@pytest.mark.timeout(300)
def test_vectors_are_the_same_beside_generation(
    engine: Engine, texts: list[list[int]], expected: Tensor
) -> None:
    if isinstance(engine, EmbeddingEngine):
        pytest.skip("it does not generate")
    greedy = Sampling(16, temperature=0.0, ignore_eos=True)
    prompts = [Request(f"g{i}", text, greedy) for i, text in enumerate(texts[:3])]
    alone = {c.id: c.token_ids for c in engine.generate(prompts)}
    done = {c.id: c for c in engine.generate([*prompts, EmbeddingRequest("e", tuple(texts))])}
    assert (torch.tensor(done["e"].embeddings) - expected).abs().max() < 1e-5
    assert {id: c.token_ids for id, c in done.items() if id != "e"} == alone
