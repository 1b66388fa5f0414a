"""Three workloads of token prompts with fixed output lengths, the same for every engine that is measured.

`shared`: one prefix of 600 tokens. `nested`: a root of 256, eight branches of 192. `mixed`: nothing shared.
The text is the source of Python's standard library, so it needs no data and any tokenizer will do.
"""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

NAMES = ("shared", "nested", "mixed")
Workload = list[tuple[list[int], int]]
"""(prompt ids, output tokens) of each request."""

_SOURCES = 40
_BRANCHES = 8
_OUTPUT_CHOICES = (16, 32, 64, 128)


def build(tokenizer: Any, n: int = 64, seed: int = 0) -> dict[str, Workload]:
    """Return all three workloads by name. One stream of random numbers makes them, in this order."""
    rng = random.Random(seed)
    cut = cutter(text_ids(tokenizer), rng)
    shared = _shared(cut, rng, n)
    mixed = _mixed(cut, rng, n)
    nested = _nested(cut, rng, n)
    return {"shared": shared, "nested": nested, "mixed": mixed}


def one(ids: list[int], name: str, n: int, seed: int = 0) -> Workload:
    """Return one workload cut from a text, by random numbers of its own: for sizes where three are too many.

    Raises KeyError for an unknown name.
    """
    rng = random.Random(seed)
    return {"shared": _shared, "mixed": _mixed, "nested": _nested}[name](cutter(ids, rng), rng, n)


def text_ids(tokenizer: Any) -> list[int]:
    """Return the tokens of the standard library's first modules."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:_SOURCES]
    text = "\n".join(module.read_text(errors="ignore") for module in modules)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def cutter(ids: list[int], rng: random.Random) -> Callable[[int], list[int]]:
    """Return a function that cuts so many tokens out of the text, anywhere."""

    def cut(length: int) -> list[int]:
        start = rng.randrange(len(ids) - length)
        return ids[start : start + length]

    return cut


def apart(workload: Workload, taken: set[int], usable: Iterable[int]) -> Workload:
    """Return the workload with other first tokens, none of them in `taken`, and add them to it.

    Equal first tokens stay equal and different ones different: what is shared within the workload stays as it
    is, and nothing is shared with a workload that ran before. So no run finds the KV of an earlier one.
    Raises ValueError when `usable` has too few tokens left.
    """
    fresh = (id for id in usable if id not in taken)
    firsts = dict.fromkeys(prompt[0] for prompt, _ in workload)
    try:
        others = {first: next(fresh) for first in firsts}
    except StopIteration:
        raise ValueError(f"the vocabulary has too few unused tokens for {len(firsts)} more") from None
    taken.update(others.values())
    return [([others[prompt[0]], *prompt[1:]], output) for prompt, output in workload]


def output_tokens(workload: Sequence[tuple[list[int], int]]) -> int:
    return sum(output for _, output in workload)


def _shared(cut: Callable[[int], list[int]], rng: random.Random, n: int) -> Workload:
    prefix = cut(600)
    return [(prefix + cut(rng.randint(24, 72)), 64) for _ in range(n)]


def _mixed(cut: Callable[[int], list[int]], rng: random.Random, n: int) -> Workload:
    workload = []
    for _ in range(n):
        length = int(rng.lognormvariate(4.8, 0.9))
        prompt = cut(min(max(length, 16), 1000))
        workload.append((prompt, rng.choice(_OUTPUT_CHOICES)))
    return workload


def _nested(cut: Callable[[int], list[int]], rng: random.Random, n: int) -> Workload:
    root = cut(256)
    branches = [cut(192) for _ in range(_BRANCHES)]
    workload = [(root + branches[index % _BRANCHES] + cut(rng.randint(16, 64)), 32) for index in range(n)]
    rng.shuffle(workload)
    return workload
