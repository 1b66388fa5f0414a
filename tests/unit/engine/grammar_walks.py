"""Outputs under a grammar, written by a model that knows nothing."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import torch

from worker.engine.grammar import Constraint

SCHEMAS = Path(__file__).parents[2] / "data" / "schemas"
_LONGEST = 600
_PLAYFUL = 60
"""After so many tokens a walk makes for the end."""


def accepted() -> dict[str, Any]:
    """Return the schemas that a grammar can hold, by name."""
    return json.loads((SCHEMAS / "accepted.json").read_text())  # type: ignore[no-any-return]


class Walker:
    """Takes random tokens that a constraint allows, until it is complete."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.end_ids = end_ids
        texts = [tokenizer.decode([id]) for id in range(min(len(tokenizer), vocabulary))]
        texts += [""] * (vocabulary - len(texts))
        closing = [sum(map(text.count, "]}")) - sum(map(text.count, ",[{")) for text in texts]
        # How much a token brings the end nearer: outside of a string, and inside.
        self._outside = np.array([100 * c - len(text) for c, text in zip(closing, texts, strict=True)])
        self._outside[sorted(end_ids)] = 10_000
        self._inside = np.array([100 * text.startswith('"') - len(text) for text in texts])

    def allowed(self, constraint: Constraint) -> "np.ndarray[Any, Any]":
        """Return the ids that may come next."""
        logits = torch.zeros(self.vocabulary)
        constraint.restrict(logits)
        return np.flatnonzero(logits.numpy() == 0)

    def write(self, constraint: Constraint, seed: int) -> str | None:
        """Return the text of one walk, or None when it grew too long to end."""
        pick = random.Random(seed)
        ids: list[int] = []
        done = False
        while not done and len(ids) < _LONGEST:
            constraint.prepare()
            allowed = self.allowed(constraint)
            chosen = allowed[pick.randrange(len(allowed))]
            if len(ids) > _PLAYFUL or pick.random() < 0.3:
                quotes = self._decode(ids).replace("\\\\", "").replace('\\"', "").count('"')
                ranks = self._inside if quotes % 2 else self._outside
                chosen = allowed[ranks[allowed].argmax()]
            ids.append(int(chosen))
            done = constraint.take(ids[-1])
        return self._decode(ids) if done else None

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def check(text: str, schema: Any) -> None:
    """Raise unless a text is JSON that a schema describes."""
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator(schema).validate(json.loads(text))
