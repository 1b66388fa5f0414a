"""Where in a schema lies what does not compile: the library often says only what."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import orjson

from jobs.grammars import schemas

_MOST_TRIED = 100
"""Schemas tried on each level: a schema of thousands of properties is not searched to its end."""


def find(schema: Any, reason: str, compiled: Callable[[Any], str | None]) -> str:
    """Return the path of the innermost schema that does not compile for this reason, such as `/items`.

    `compiled` returns why a schema does not compile by itself. Empty: it is the whole, or cannot be told.
    """
    for path, inner in islice(_within(schema), _MOST_TRIED):
        # By itself, a reference leads nowhere.
        if isinstance(inner, dict) and b'"$ref"' not in orjson.dumps(inner) and compiled(inner) == reason:
            return path + find(inner, reason, compiled)
    return ""


def _within(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside one, with the path to each."""
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name in schemas.MAPS and isinstance(value, dict):
            yield from ((f"/{name}/{key}", inner) for key, inner in value.items())
        elif (name in schemas.LISTS or name == "items") and isinstance(value, list):
            yield from ((f"/{name}/{index}", inner) for index, inner in enumerate(value))
        elif name in schemas.SINGLES:
            yield f"/{name}", value
