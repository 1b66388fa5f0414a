"""The rules of outputs in llguidance's Lark dialect: an answer in JSON, calls, free text, thoughts before it.

They are about text alone. Which token writes `<tool_call>` is the worker's matter, which knows the tokenizer:
a marker is a rule of its own here, which `worker/engine/grammar.py` rewrites where it is a special token.
"""

import json
import re
from typing import Any

# All tokenizations of a text are allowed, also where only one text is. Forcing one of them would take special
# tokens for the text that a schema spells alike.
_HEAD = '%llguidance {"no_forcing": true}'
# Between the tokens of JSON: what models write, and no endless blank.
_JSON_OPTIONS = {"whitespace_flexible": False, "whitespace_pattern": r"[ ]{1,2}|\r?\n[ \t]{0,32}"}

_COMMON = {
    "TEXT": r"/(?s:.*)/",
    "GAP": r"/[ \t\r\n]{0,4}/",
    "BLANK": r"/\s*/",
    "PLAIN": r"/[^\s{](?s:.*)/",
    "SEPARATOR": r"/[ ]?;[ \n]?|\n/",
    # Lazy: once a marker is complete, it is certain what it begins.
    "think_open[lazy]": '"<think>"',
    "think_close[lazy]": 'TEXT "</think>"',
    "tool_open": '"<tool_call>"',
    "tool_close": '"</tool_call>"',
    "text_tool_open[lazy]": 'TEXT "<tool_call>"',
    "python_tag[lazy]": '"<|python_tag|>"',
}
_QUOTED = re.compile(r'"[^"]*"|/(?:\\.|[^/])*/')


def grammar(rules: dict[str, str]) -> str:
    """Return the text of a grammar, with those of the common rules that its rules need."""
    known = {name.removesuffix("[lazy]"): name for name in _COMMON}
    found = dict(rules)
    waiting = list(rules.values())
    while waiting:
        body = waiting.pop()
        names = [] if body.startswith("%json") else re.findall(r"[A-Za-z_]\w*", _QUOTED.sub(" ", body))
        for name in (known[name] for name in names if name in known):
            if name not in found:
                found[name] = _COMMON[name]
                waiting.append(_COMMON[name])
    return "\n".join([_HEAD, *(f"{name}: {body}" for name, body in found.items())]) + "\n"


def document(schema: dict[str, Any]) -> str:
    """Return the body of a rule for the JSON that a schema describes."""
    return f"%json {json.dumps({'x-guidance': _JSON_OPTIONS} | schema)}"


def start(reasoning: str | None, free: bool) -> str:
    """Return the body of `start`: an `answer`, after thoughts if the model thinks.

    `reasoning` is open when the prompt ends inside <think>, closed when the model begins it, or does not.
    `free`: the answer may be any text, and so may thoughts that do not end.
    """
    if reasoning is None:
        return "answer"
    if free:
        thought = "think_close answer | TEXT"
        return thought if reasoning == "open" else f"answer | think_open ({thought})"
    thought = "think_close GAP answer"
    return thought if reasoning == "open" else f"answer | think_open {thought}"


def hermes(names: list[str], single: bool, free: bool) -> dict[str, str]:
    """Return the rules of `<tool_call>` blocks, and of an answer that is text, or text and then blocks."""
    more = "" if single else " (GAP tool_open block)*"
    rules = {
        "call": " | ".join(names),
        "block": "GAP call GAP tool_close",
        "calls": f"tool_open block{more}",
    }
    return rules | ({"answer": f"TEXT | text_tool_open block{more}"} if free else {})


def llama(names: list[str], single: bool, free: bool) -> dict[str, str]:
    """Return the rules of bare JSON calls, and of an answer that is text which does not begin with `{`, or
    calls.
    """
    more = "" if single else " (SEPARATOR call)*"
    rules = {"call": " | ".join(names), "calls": f"python_tag? call{more}"}
    return rules | ({"answer": "BLANK (PLAIN | calls)?"} if free else {})
