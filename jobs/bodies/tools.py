"""Tools that a model may call, and the form its answer must have."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import orjson

from jobs import values
from jobs.bodies.base import refuse
from jobs.bodies.message import TOOL_NAME

MOST_TOOLS = 128
CHOICES = ("none", "auto", "required")
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REMEMBERED = 64
_MOST_BYTES = 256 * 1024
"""Of a value that is remembered: a file of long ones must not stay in memory."""


def _once(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Check equal values once: most lines of a job have the same tools or the same schema.

    What comes out is shared, so nobody may change it.
    """

    @lru_cache(_REMEMBERED)
    def remembered(data: bytes) -> Any:
        return check(orjson.loads(data))

    def checked(value: Any) -> Any:
        data = orjson.dumps(value)
        return remembered(data) if len(data) <= _MOST_BYTES else check(value)

    return checked


@_once
def tools(value: Any) -> list[dict[str, Any]]:
    """Return tool definitions without their nulls; raises ParameterRefused that names the place."""
    if not isinstance(value, list):
        refuse("tools", value, "it must be an array of tools")
    if len(value) > MOST_TOOLS:
        refuse("tools", value, f"at most {MOST_TOOLS} tools, not {len(value)}")
    found = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]
    names = [tool["function"]["name"] for tool in found]
    for index, name in enumerate(names):
        if name in names[:index]:
            refuse(f"tools[{index}].function.name", name, "another tool has this name")
    return found


def tool_choice(value: Any) -> str | dict[str, Any]:
    """Return a tool choice in its one form: a word, or the choice of one tool by name."""
    if isinstance(value, str) and value in CHOICES:
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    choice = {"type": "function", "function": {"name": name}}
    if not isinstance(name, str) or value != choice:
        form = '{"type": "function", "function": {"name": "..."}}'
        refuse("tool_choice", value, f"it must be one of {', '.join(CHOICES)}, or {form}")
    return choice


@_once
def response_format(value: Any) -> dict[str, Any] | None:
    """Return the form that the answer must have, None for any; raises ParameterRefused."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        refuse("response_format", value, "its type must be text, json_object or json_schema")
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _only(value, allowed, "response_format")
    if kind != "json_schema":
        return None if kind == "text" else {"type": kind}
    return {
        "type": kind,
        "json_schema": _named_schema(value.get("json_schema"), "response_format.json_schema"),
    }


def _named_schema(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(at, value, "it must be an object with name and schema")
    _only(value, {"name", "description", "schema", "strict"}, at)
    _name(value.get("name"), _SCHEMA_NAME, f"{at}.name")
    _text_and_strict(value, at)
    if not isinstance(value.get("schema"), dict | None):
        refuse(f"{at}.schema", value.get("schema"), "it must be a JSON schema, an object")
    return _present(value)


def _tool(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type") != "function":
        refuse(at, value, 'a tool must be of the form {"type": "function", "function": {...}}')
    _only(value, {"type", "function"}, at)
    function = value.get("function")
    if not isinstance(function, dict):
        refuse(f"{at}.function", function, "it must be an object with name and parameters")
    at += ".function"
    _only(function, {"name", "description", "parameters", "strict"}, at)
    _name(function.get("name"), TOOL_NAME, f"{at}.name")
    _text_and_strict(function, at)
    parameters = function.get("parameters")
    if parameters is not None and not (
        isinstance(parameters, dict) and parameters.get("type", "object") == "object"
    ):
        refuse(f"{at}.parameters", parameters, "it must be a JSON schema of the type object")
    return {"type": "function", "function": _present(function)}


def _only(value: dict[str, Any], allowed: set[str], at: str) -> None:
    for name in _present(value):
        if name not in allowed:
            refuse(f"{at}.{name:.80}", value[name], f"unknown; {at} has {', '.join(sorted(allowed))}")


def _name(value: Any, pattern: re.Pattern[str], at: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        refuse(at, value, f"it must match {pattern.pattern}")


def _text_and_strict(value: dict[str, Any], at: str) -> None:
    if not isinstance(value.get("description"), str | None):
        refuse(f"{at}.description", value["description"], "it must be a string")
    if not isinstance(value.get("strict"), bool | None):
        refuse(
            f"{at}.strict", value["strict"], f"it must be true or false, not {values.kind(value['strict'])}"
        )


def _present(value: dict[str, Any]) -> dict[str, Any]:
    return {name: inner for name, inner in value.items() if inner is not None}
