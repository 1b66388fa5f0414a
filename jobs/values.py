"""Values in the words of messages: JSON by its type, or itself when short; numbers with what they count."""

from typing import Any

import orjson

_NAMES = {list: "an array", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
_MOST_CHARACTERS = 80


def counted(number: int, noun: str) -> str:
    """Return a number with what it counts: `1 worker`, `1,200 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rate(number: float) -> str:
    """Return how much a second, with a digit behind the point where that says something."""
    return f"{number:,.1f}" if number < 100 else f"{number:,.0f}"


def printable(words: str) -> str:
    """Return a text in which nothing can move the cursor or colour the screen."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def printable_lines(words: str) -> str:
    """Return a text of several lines in which, besides these, nothing can."""
    return "\n".join(map(printable, words.replace("\t", " ").split("\n")))


def kind(value: Any) -> str:
    """Name a JSON value's type in the words of JSON."""
    return _NAMES.get(type(value), "a number")


def short(value: Any) -> str:
    """Return a JSON value as text of at most 80 characters, however long or deeply nested it is."""
    if isinstance(value, str):
        value = value[: _MOST_CHARACTERS + 1]
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # nested too deeply, or no Unicode text
        return kind(value)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def too_deep(value: Any, levels: int) -> bool:
    """Tell whether arrays and objects nest in each other more than `levels` times."""
    outer = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        outer = [
            child
            for parent in outer
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
    return bool(outer)
