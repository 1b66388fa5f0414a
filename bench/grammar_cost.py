"""What grammars cost a step of the engine, with nothing beside it that would hide the masks."""

import json
import time
from typing import Any

import torch

from jobs import grammars
from worker.engine.grammar import Grammars

_ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "rare"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 100},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
_TEXT = json.dumps(
    {
        "name": "Zoë Miller of the long road",
        "age": 31,
        "tags": ["new", "rare", "old"],
        "address": {"street": "12 Main Street, near the river", "zip": "12345"},
    },
    ensure_ascii=False,
)
_TOOL = {"type": "function", "function": {"name": "order", "parameters": _ORDER}}
_REPEATS = 5


def measure(tokenizer: Any, vocabularies: tuple[int, ...] = (49_152, 151_936)) -> list[dict[str, Any]]:
    """Return seconds for each step, of one row and of 64 at once."""
    response_format = {"type": "json_schema", "json_schema": {"schema": _ORDER}}
    texts = {
        "json_schema": grammars.build(response_format, [], "none", None, None, True),
        "tools_auto": grammars.build(None, [_TOOL], "auto", "hermes", None, True),
    }
    found = []
    for vocabulary in vocabularies:
        opened = Grammars(tokenizer, vocabulary, frozenset((tokenizer.eos_token_id,)))
        for kind, grammar in texts.items():
            assert grammar is not None
            for rows in (1, 64):
                steps = [
                    seconds for _ in range(_REPEATS) for seconds in _run(opened, grammar, tokenizer, rows)
                ]
                found.append({"grammar": kind, "vocabulary": vocabulary, "rows": rows, "step_seconds": steps})
        opened.close()
    return found


def _run(opened: Grammars, grammar: str, tokenizer: Any, rows: int) -> list[float]:
    """Write one text in all rows, and return the seconds of each step."""
    constraints = [opened.open(grammar) for _ in range(rows)]
    logits = torch.zeros(rows, opened.vocabulary)
    seconds = []
    for id in tokenizer.encode(_TEXT, add_special_tokens=False):
        started = time.perf_counter()
        for constraint in constraints:
            constraint.prepare()
        for constraint, row in zip(constraints, logits, strict=True):
            constraint.restrict(row)
        for constraint in constraints:
            constraint.take(id)
        seconds.append(time.perf_counter() - started)
    return seconds
