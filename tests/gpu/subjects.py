"""Small random models in half precision, requests to them, and how far their answers may be off."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench import qwen_like
from worker.engine import Completion, EngineConfig, Request, Sampling, guards, loader
from worker.engine.attention_flash import FlashAttention
from worker.engine.fast import FastEngine

VOCABULARY = 2048
_CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# Windows that end inside a page, and after the first.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _CONFIG,
    "qwen3": _CONFIG,
    "mistral": _CONFIG | {"sliding_window": 300},
    "gemma2": _CONFIG | {"sliding_window": 100, "query_pre_attn_scalar": 64},
}
_KV_BYTES = 64 << 20
_PREFIX = [(7 * i + 3) % VOCABULARY for i in range(600)]
_BRANCH = [(11 * i + 5) % VOCABULARY for i in range(300)]
_OUTPUT_TOKENS = 20


class Subject:
    """A model in half precision on the device, and the same numbers in float32 on the CPU.

    The engine may change the model it is given, so each gets one of its own.
    """

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        self.name = name
        self.device = device
        self.dtype = dtype
        self.reference = _build(name).to(dtype).float()

    def model(self) -> Any:
        """Return a fresh one as transformers runs it."""
        return _build(self.name).to(self.dtype).to(self.device)

    def paged(self, functions: Any, **fields: Any) -> FastEngine:
        """Return an engine over pages."""
        return self.engine(FlashAttention(functions), **fields)

    def engine(self, backend: Any, **fields: Any) -> FastEngine:
        """Return an engine on a backend of attention."""
        loaded = loader.wrap(self.model(), qwen_like.tokenizer(VOCABULARY, 4096))
        config = EngineConfig(**{"kv_memory_bytes": _KV_BYTES, **fields})
        return FastEngine(loaded, config, guards.prepare(loaded.model, backend))


@functools.cache
def subject(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Subject:
    """Return a subject, made once."""
    return Subject(name, device, dtype)


@functools.cache
def _source(name: str) -> Any:
    config = AutoConfig.for_model(name, **CONFIGS[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _build(name: str) -> Any:
    import copy

    return copy.deepcopy(_source(name))


def requests(**sampling: Any) -> list[Request]:
    """Return greedy requests: some share two pages and more, some branch off, some are equal or alone."""
    tails = [[(13 * i + 17 * t) % VOCABULARY for i in range(1 + 9 * t)] for t in range(6)]
    prompts = [_PREFIX + tail for tail in tails]
    prompts += [_PREFIX[:300] + _BRANCH + tail for tail in tails[:4]]
    prompts += [tail + _BRANCH[:20] for tail in tails] + [_PREFIX, _PREFIX[:512], _PREFIX + tails[0]]
    fields = {"max_tokens": _OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    return [Request(str(i), prompt, Sampling(**fields)) for i, prompt in enumerate(prompts)]


def needs(*names: str) -> None:
    """Skip a test of what EngineConfig does not have yet."""
    missing = set(names) - {field.name for field in dataclasses.fields(EngineConfig)}
    if missing:
        pytest.skip(f"the engine has no {', '.join(sorted(missing))}")


def run(engine: FastEngine, asked: Sequence[Request]) -> dict[str, Completion]:
    """Run requests to their end; no error, nothing left in memory."""
    done = {completion.id: completion for completion in engine.generate(asked)}
    assert {id: c.error for id, c in done.items()} == {r.id: None for r in asked}
    assert engine.stats.attention_calls == engine.stats.steps * len(engine._runner.layout.layers)
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0
    return done


@torch.inference_mode()
def logprobs(model: Any, asked: Sequence[Request], done: dict[str, Completion]) -> list[Tensor]:
    """Return the log softmax [n, V] that a model has for the tokens of each completion, one at a time."""
    found = []
    for request in asked:
        ids = [*request.prompt_ids, *done[request.id].token_ids][:-1]
        logits = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
        found.append(logits[len(request.prompt_ids) - 1 :].float().cpu().log_softmax(-1))
    return found


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far log probabilities are off those in float32: one number for each token."""

    ours: Tensor
    theirs: Tensor
    """Of transformers' own code on the same device in the same precision."""
    regret: Tensor
    """How much less probable our token is than the most probable one, in float32."""


def errors(subject: Subject, asked: Sequence[Request], done: dict[str, Completion]) -> Errors:
    """Compare completions that have logprobs with transformers, in float32 and in the same precision."""
    exact = logprobs(subject.reference, asked, done)
    same = logprobs(subject.model(), asked, done)
    chosen = [torch.tensor(done[r.id].token_ids)[:, None] for r in asked]
    right = torch.cat([rows.gather(1, ids)[:, 0] for rows, ids in zip(exact, chosen, strict=True)])
    theirs = torch.cat([rows.gather(1, ids)[:, 0] for rows, ids in zip(same, chosen, strict=True)])
    best = torch.cat([rows.amax(1) for rows in exact])
    ours = torch.tensor([each.logprob for r in asked for each in done[r.id].logprobs or []])
    off = (ours - right).abs() if len(ours) else torch.zeros_like(right)
    return Errors(off, (theirs - right).abs(), best - right)


def check(subject: Subject, asked: Sequence[Request], done: dict[str, Completion]) -> Errors:
    """Assert that rounding explains all that is off: as much as in transformers' own code, not more."""
    found = errors(subject, asked, done)
    assert len({token for c in done.values() for token in c.token_ids}) >= 10, "outputs must vary"
    assert float(found.ours.median()) <= 1.5 * float(found.theirs.median()) + 1e-4
    assert float(found.ours.max()) <= 2 * float(found.theirs.max()) + 1e-3
    assert float(found.regret.max()) <= 4 * float(found.theirs.max()) + 1e-3
    return found
