"""What the tests of embeddings share: tiny random encoders, texts, and what transformers gives for each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from worker.engine import EmbeddingRequest, Engine, EngineConfig, loader, opening
from worker.engine.embeddings import pooling

VOCABULARY = 259
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 514,
    "initializer_range": 0.5,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _COMMON,
    "roberta": _COMMON | {"pad_token_id": 1},
    "xlm-roberta": _COMMON | {"pad_token_id": 1},
    # Every other layer sees eight tokens to each side.
    "modernbert": _COMMON | {"pad_token_id": 0, "local_attention": 16, "global_attn_every_n_layers": 2},
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 514,
        "initializer_range": 0.5,
    },
    "mpnet": _COMMON | {"pad_token_id": 1},
    "t5": {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}
LENGTHS = (1, 3, 40, 7, 40, 100, 17, 60, 2, 33, 3, 250)
_generator = torch.Generator().manual_seed(1)
TEXTS = [torch.randint(2, VOCABULARY, (n,), generator=_generator).tolist() for n in LENGTHS]


class NoTokenizer:
    """Embedding token ids takes no tokenizer."""

    eos_token_id = None
    model_max_length = 1 << 40

    def decode(self, ids: list[int], **_: Any) -> str:
        return str(ids)


def build(name: str) -> Any:
    """Return a random encoder in float64."""
    config = AutoConfig.for_model(name, **ENCODERS[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "t5":
            from transformers import T5EncoderModel

            return T5EncoderModel(config).double().eval()
        return AutoModel.from_config(config, dtype=torch.float64).eval()


def open_engine(model: Any, how: pooling.Pooling | None = None, **fields: Any) -> Engine:
    """Return the engine that a model gets, with another pooling than its own where one is given."""
    loaded = loader.wrap(model, NoTokenizer())
    if how is not None:
        loaded = replace(loaded, pooling=how)
    return opening.over(loaded, EngineConfig(**{"kv_memory_bytes": 1 << 24} | fields))


def embed(engine: Engine, *texts: list[list[int]]) -> Tensor:
    """Return the vectors of texts, which come in one request each list; none may fail."""
    requests = [EmbeddingRequest(str(i), tuple(each)) for i, each in enumerate(texts)]
    done = {c.id: c for c in engine.generate(requests)}
    assert [c.error for c in done.values()] == [None] * len(texts)
    vectors = [vector for r in requests for vector in done[r.id].embeddings or []]
    return torch.tensor(vectors, dtype=torch.float64)


@torch.inference_mode()
def alone(model: Any, text: list[int]) -> Tensor:
    """Return the hidden states [n, D] of one text as transformers gives them, without mask or padding."""
    output = model.base_model(input_ids=torch.tensor([text]))
    hidden: Tensor = output.last_hidden_state[0]
    return hidden.double()


def unit(vector: Tensor) -> Tensor:
    return vector / vector.norm(dim=-1, keepdim=True)


def write_modules(path: Path, pooling_config: dict[str, Any], *others: str) -> None:
    """Write the files in which sentence-transformers keeps a model's pooling."""
    import json

    kinds = ["Transformer", "Pooling", *others]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
