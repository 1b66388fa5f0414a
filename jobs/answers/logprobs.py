"""Log probabilities of tokens, in the shapes of the chat and the completions endpoint."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs import errors

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class Token:
    """A token and its natural log probability; None: it is the first of all, nothing led to it.

    `top` are the most probable tokens in its place, highest first. `offset` is where it begins in the text.
    """

    data: bytes
    logprob: float | None
    top: "tuple[Token, ...]" = ()
    offset: int = 0

    @property
    def text(self) -> str:
        """The token as text; a part of a character is U+FFFD."""
        return self.data.decode(errors="replace")


def chat(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat completion; raises UnusableOutput."""
    content = [_one(token) | {"top_logprobs": [_one(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def completions(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a text completion; raises UnusableOutput."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_number(token.logprob) for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _one(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": _number(token.logprob), "bytes": list(token.data)}


def _by_text(token: Token) -> dict[str, float | None] | None:
    """Return the top tokens, and the token itself, by their texts: of equal texts the most probable."""
    if token.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for one in (*token.top, token):
        found.setdefault(one.text, _number(one.logprob))
    return found


def _number(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    if math.isnan(logprob) or logprob == math.inf:
        raise errors.UnusableOutput(what="log probabilities that are not numbers")
    return max(logprob, LEAST)
