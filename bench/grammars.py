"""Compare libraries that hold an output to a JSON schema: coverage, compile time, mask time a token.

`python -m bench.grammars`: a JSON line for each figure. Libraries and schemas are installed on the first run.
"""

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
import torch

PACKAGES = Path(__file__).resolve().parents[1] / ".longhaul" / "peers" / "grammars"
_PINS = Path(__file__).parent / "peers" / "grammars.txt"
_SECONDS = 10
"""For one schema; what takes longer is as good as refused."""


class Matcher(Protocol):
    """One output under a grammar."""

    def mask(self) -> bool: ...
    def take(self, token_id: int) -> bool: ...
    def may_end(self) -> bool: ...


class LLGuidance:
    """llguidance as the engine uses it: its own options for white space, every tokenization allowed."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        from worker.engine.grammar import Grammars

        self._grammars = Grammars(tokenizer, vocabulary, frozenset((tokenizer.eos_token_id,)))
        self._words = np.empty((vocabulary + 32) // 32, np.int32)
        self.compile({"type": "object"})

    def compile(self, schema: dict[str, Any]) -> Callable[[], Matcher]:
        from jobs import grammars

        wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
        text = grammars.build(wanted, [], "none", None, None, True)
        assert text is not None
        compiled = self._grammars._compile(text)
        return lambda: _LLMatcher(compiled.deep_copy(), self._words)


class _LLMatcher:
    def __init__(self, matcher: Any, words: Any) -> None:
        self._matcher = matcher
        self._words = words

    def mask(self) -> bool:
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return not self._matcher.is_error()

    def take(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())


class XGrammar:
    """xgrammar with the meaning of JSON Schema (strict_mode off), on one thread, nothing remembered."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocabulary)
        self._end = tokenizer.eos_token_id

    def compile(self, schema: dict[str, Any]) -> Callable[[], Matcher]:
        compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        return lambda: _XMatcher(self._xgrammar.GrammarMatcher(compiled), self._bitmask, self._end)


class _XMatcher:
    def __init__(self, matcher: Any, bitmask: torch.Tensor, end: int) -> None:
        self._matcher = matcher
        self._bitmask = bitmask
        self._end = end

    def mask(self) -> bool:
        self._matcher.fill_next_token_bitmask(self._bitmask)
        return True

    def take(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def may_end(self) -> bool:
        return self.take(self._end)


LIBRARIES = {"llguidance": LLGuidance, "xgrammar": XGrammar}


@click.command()
@click.option("--tools", default=400, show_default=True, help="How many of the tool schemas.")
@click.option("--cost-only", is_flag=True, help="Only what a step of the engine pays.")
@click.option("--verbose", is_flag=True, help="Also say which schemas fail, and why.")
def main(tools: int, cost_only: bool, verbose: bool) -> None:
    """Compare the libraries."""
    from transformers import AutoTokenizer

    from bench import grammar_cost, grammar_schemas
    from worker.engine import smollm2

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(smollm2.ensure())
    for cost in grammar_cost.measure(tokenizer):
        cost["step_ms"] = _times(cost.pop("step_seconds"))
        print(json.dumps({"figure": "cost"} | cost), flush=True)
    if cost_only:
        return
    install()
    sys.path.append(str(PACKAGES))  # behind the project's own
    cases = grammar_schemas.cases(tools)
    for library, kind in LIBRARIES.items():
        subject = kind(tokenizer, len(tokenizer))
        results = all_tried(subject, tokenizer, cases)
        for figure, value in summary(cases, results).items():
            print(json.dumps({"library": library, "figure": figure} | value), flush=True)
        for case, result in zip(cases, results, strict=True):
            if verbose and (result.get("error") or result["wrong"]):
                print(json.dumps({"library": library, "schema": case.name} | result), file=sys.stderr)


def install() -> None:
    """Put what is compared beside the project's own packages, where nothing else sees it."""
    stamp = PACKAGES / "longhaul-stamp"
    if stamp.is_file() and stamp.read_text() == _PINS.read_text():
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
    subprocess.run([*pip, "--upgrade", "--target", str(PACKAGES), "-r", str(_PINS)], check=True)
    stamp.write_text(_PINS.read_text())


def tried(subject: Any, tokenizer: Any, case: Any) -> dict[str, Any]:
    """Compile a schema, then write its instances."""
    started = time.perf_counter()
    try:
        fresh = subject.compile(case.schema)
    except Exception as error:
        return {"error": str(error).split("\n")[0][:300], "seconds": time.perf_counter() - started}
    seconds = time.perf_counter() - started
    masks: list[float] = []
    wrong = []
    for text in case.valid:
        if not _written(fresh(), tokenizer.encode(text, add_special_tokens=False), masks):
            wrong.append(f"refused: {text[:200]}")
    for text in case.invalid:
        if _written(fresh(), tokenizer.encode(text, add_special_tokens=False), []):
            wrong.append(f"accepted: {text[:200]}")
    return {"seconds": seconds, "masks": masks, "wrong": wrong}


def _written(matcher: Matcher, ids: list[int], masks: list[float]) -> bool:
    for id in ids:
        started = time.perf_counter()
        if not matcher.mask():
            return False
        masks.append(time.perf_counter() - started)
        if not matcher.take(id):
            return False
    return matcher.may_end()


def all_tried(subject: Any, tokenizer: Any, cases: list[Any]) -> list[dict[str, Any]]:
    """Try each case in a child, as a library may crash or never return; the next goes on after that case."""
    context = multiprocessing.get_context("fork")
    results: list[dict[str, Any]] = []
    while len(results) < len(cases):
        here, there = context.Pipe(duplex=False)
        left = cases[len(results) :]
        child = context.Process(target=_serve, args=(there, subject, tokenizer, left))
        child.start()
        there.close()
        try:
            while len(results) < len(cases) and here.poll(_SECONDS):
                results.append(here.recv())
            if len(results) < len(cases):
                results.append({"error": f"over {_SECONDS} s"})
        except EOFError:
            results.append({"error": "crashed"})
        child.kill()
        child.join()
        here.close()
    return results


def _serve(pipe: Any, subject: Any, tokenizer: Any, cases: list[Any]) -> None:
    tried(subject, tokenizer, cases[0])  # pages that are shared with the parent until they are written to
    for case in cases:
        pipe.send(tried(subject, tokenizer, case))


def summary(cases: list[Any], results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures: shares, and times in milliseconds."""
    compiled = [(case, result) for case, result in zip(cases, results, strict=True) if "masks" in result]
    accepted = sum(len(case.valid) for case, _ in compiled)
    refused = sum(len(case.invalid) for case, _ in compiled)
    wrongly = [reason.split(":")[0] for _, result in compiled for reason in result["wrong"]]
    return {
        "schemas_compiled": _share(len(compiled), len(cases)),
        "valid_instances_accepted": _share(accepted - wrongly.count("refused"), accepted),
        "invalid_instances_refused": _share(refused - wrongly.count("accepted"), refused),
        "schemas_with_a_wrong_answer": _share(sum(bool(r["wrong"]) for _, r in compiled), len(compiled)),
        "compile_ms": _times([result["seconds"] for _, result in compiled]),
        "mask_ms": _times([seconds for _, result in compiled for seconds in result["masks"]]),
    }


def _share(part: int, whole: int) -> dict[str, Any]:
    return {"count": part, "of": whole, "share": round(part / whole, 4) if whole else None}


def _times(seconds: list[float]) -> dict[str, Any]:
    p50, p99, longest = (1000 * np.percentile(seconds, [50, 99, 100])).tolist()
    return {"n": len(seconds), "p50": round(p50, 4), "p99": round(p99, 4), "max": round(longest, 4)}


if __name__ == "__main__":
    main()
