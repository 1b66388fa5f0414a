"""Rows as conversations, in the two forms that trainers read.

A row needs `messages`, the prompt's as a list of {role, content}, and `output`, the assistant's text. All
other columns are left out, since trainers refuse or misread what they do not know.
"""

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from jobs import errors

COLUMNS = ("messages", "output")
_SPEAKERS = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt"}


class NoConversation(errors.LonghaulError):
    """A row without an output is no conversation: leave it out, or choose --format parquet or jsonl."""


def messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return {"messages": [{"role", "content"}]}: the prompt's messages, then the output."""
    return {"messages": _turns(row)}


def sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    """Return {"conversations": [{"from", "value"}]}. A role without a name in this form keeps its own."""
    turns = [
        {"from": _SPEAKERS.get(turn["role"], turn["role"]), "value": turn["content"]} for turn in _turns(row)
    ]
    return {"conversations": turns}


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"messages": messages, "sharegpt": sharegpt}


def columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns that a conversation is made of."""
    return batch.select(list(COLUMNS))


def _turns(row: dict[str, Any]) -> list[dict[str, Any]]:
    if row["output"] is None:
        raise NoConversation()
    said = [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"] or ()]
    return [*said, {"role": "assistant", "content": row["output"]}]
