"""Tool calls in the text of a model, in the formats that chat templates teach it."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_OPENING, _CLOSING, _PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"
_SPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN = re.compile(r"[;\s]*")


@dataclass(frozen=True)
class Call:
    """A function to call. `arguments` is a JSON object, in the words of the model."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Format:
    """How calls are written. `markers` must be in the text even where a tokenizer hides them as special."""

    parse: Callable[[str], tuple[str, list[Call]]]
    markers: tuple[str, ...] = ()


def parse(format: str, text: str) -> tuple[str, list[Call]]:
    """Return the text without its calls, and the calls. What is not a whole call stays in the text."""
    return FORMATS[format].parse(text)


def _hermes(text: str) -> tuple[str, list[Call]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with text before and between."""
    kept, calls, kept_from = "", [], 0
    at = text.find(_OPENING)
    while at >= 0:
        inside = at + len(_OPENING)
        call, end = _call(text, inside, ("arguments",), needed=False)
        end = _spaces(text, end)
        if call is not None and text.startswith(_CLOSING, end):
            kept += text[kept_from:at]
            calls.append(call)
            kept_from = inside = end + len(_CLOSING)
        at = text.find(_OPENING, inside)
    return kept + text[kept_from:], calls


def _llama(text: str) -> tuple[str, list[Call]]:
    """`{"name": ..., "parameters": {...}}`, several with `;` or newlines between, and no other text."""
    at = _spaces(text, 0)
    at = _after(_BETWEEN, text, at + len(_PYTHON) * text.startswith(_PYTHON, at))
    calls = []
    while at < len(text):
        # Without arguments it is as likely an answer that happens to have a name.
        call, end = _call(text, at, ("parameters", "arguments"), needed=True)
        if call is None:
            return text, []
        calls.append(call)
        at = _after(_BETWEEN, text, end)
    return ("", calls) if calls else (text, [])


FORMATS = {"hermes": Format(_hermes, (_OPENING, _CLOSING)), "llama": Format(_llama)}


def _call(text: str, at: int, names: tuple[str, ...], needed: bool) -> tuple[Call | None, int]:
    """Return the call whose JSON begins at a place, and where it ends; (None, 0) if there is none."""
    try:
        members, end = _members(text, at)
    except (ValueError, RecursionError):
        return None, 0
    name, _ = members.get("name", (None, ""))
    given = next((members[key] for key in names if key in members), None)
    arguments = _arguments(*given) if given else None if needed else "{}"
    if not isinstance(name, str) or not name or arguments is None or not _is_unicode(name + arguments):
        return None, 0
    return Call(name, arguments), end


def _arguments(value: Any, source: str) -> str | None:
    """Return arguments as the text of a JSON object; some models write that text as a string."""
    if isinstance(value, str):
        try:
            value, source = _DECODER.decode(value), value
        except (ValueError, RecursionError):
            return None
    return source if isinstance(value, dict) else "{}" if value is None else None


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """Return the members of the JSON object at a place, each with its source, and where the object ends.

    Raises ValueError when there is none.
    """
    members: dict[str, tuple[Any, str]] = {}
    at = _past("{", text, at)
    while not text.startswith("}", at):
        if members:
            at = _past(",", text, at)
        name, at = _DECODER.raw_decode(text, at)
        if not isinstance(name, str):
            raise ValueError("a member without a name")
        at = _past(":", text, at)
        value, end = _DECODER.raw_decode(text, at)
        members[name] = value, text[at:end]
        at = _spaces(text, end)
    return members, at + 1


def _past(mark: str, text: str, at: int) -> int:
    """Return where the text goes on after a mark and the spaces around it."""
    at = _spaces(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"no {mark}")
    return _spaces(text, at + 1)


def _spaces(text: str, at: int) -> int:
    return _after(_SPACE, text, at)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _is_unicode(text: str) -> bool:
    """Tell whether text can be written: an escaped half of a surrogate pair cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _not_json(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


# Where a number ends is all that is asked: its value may have more digits than Python reads.
_DECODER = json.JSONDecoder(parse_constant=_not_json, parse_int=len, parse_float=len)
