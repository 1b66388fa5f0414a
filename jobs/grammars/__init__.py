"""What an output must look like, as a grammar made of response_format and tools."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from jobs import errors
from jobs.grammars import compiler, places, schemas
from jobs.grammars import rules as lark

MOST_BYTES = 512 * 1024
"""A longer grammar is refused: it goes with every request of the job."""

_FORMATS = {"hermes": lark.hermes, "llama": lark.llama}


def build(
    response_format: dict[str, Any] | None,
    tools: list[dict[str, Any]],
    tool_choice: str | dict[str, Any],
    tool_format: str | None,
    reasoning: str | None,
    parallel: bool,
) -> str | None:
    """Return the grammar of an output, or None when any text will do.

    `tool_choice` is none, auto, required or a named function, which is called once; `tool_format` (hermes,
    llama) how the model writes calls; `reasoning` (closed, open) as in `lark.start`; `parallel`
    whether there may be more than one call. Raises errors.ParameterRefused, with the place and the reason,
    for a schema that cannot be compiled. What was asked before is remembered, unless it is very long.
    """
    if not tools:
        tool_choice = "none"
    if tool_choice == "none" and not _is_json(response_format):
        return None
    # Keys stay as they are: the order of properties is the order in which the model writes them.
    wanted = orjson.dumps([response_format, tools, tool_choice, tool_format, reasoning, parallel])
    outcome = _built(wanted) if len(wanted) <= MOST_BYTES else _built.__wrapped__(wanted)
    if isinstance(outcome, _Refused):
        raise errors.ParameterRefused(outcome.message, param=outcome.param)
    return outcome


@dataclass(frozen=True)
class _Refused:
    message: str
    param: str


@dataclass(frozen=True)
class _Part:
    """A rule of JSON, and the parameter that its schema comes from."""

    param: str
    name: str
    schema: dict[str, Any]
    root: str = ""
    """Where in it the user's schema is."""


class _Unfit(ValueError):
    def __init__(self, reason: object, param: str) -> None:
        super().__init__(f"The schema cannot be used: {reason}.")
        self.param = param


@lru_cache(maxsize=256)
def _built(wanted: bytes) -> str | _Refused:
    response_format, tools, choice, tool_format, reasoning, parallel = orjson.loads(wanted)
    if choice != "none" and tool_format not in _FORMATS:
        return _Refused("This model's chat template has no form for tool calls.", "tools")
    try:
        answers = (
            [_document(response_format)] if choice in ("none", "auto") and _is_json(response_format) else []
        )
        calls = [] if choice == "none" else _calls(tools, choice, tool_format)
    except _Unfit as error:
        return _Refused(str(error), error.param)
    single = isinstance(choice, dict) or not parallel
    free = choice == "auto" and not answers
    rules = {"start": lark.start(reasoning, free)}
    if calls:
        rules |= _FORMATS[tool_format]([part.name for part in calls], single, free)
    rules.setdefault("answer", " | ".join([part.name for part in answers] + ["calls"] * bool(calls)))
    return _checked(rules, answers + calls)


def _is_json(response_format: dict[str, Any] | None) -> bool:
    return response_format is not None and response_format["type"] != "text"


def _document(response_format: dict[str, Any]) -> _Part:
    schema = None
    if response_format["type"] == "json_schema":
        schema = response_format["json_schema"].get("schema")
    fitted = {"type": "object"} if schema is None else _fitted(schema, "", "response_format")
    return _Part("response_format", "json", fitted)


def _calls(tools: list[dict[str, Any]], choice: str | dict[str, Any], tool_format: str) -> list[_Part]:
    """Return a part for each function that may be called."""
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    parts = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if named in (None, function["name"]):
            param = f"tools[{index}].function.parameters"
            call, root = _call(function, tool_format, param)
            parts.append(_Part(param, f"call_{index}", call, root))
    return parts


def _call(function: dict[str, Any], tool_format: str, param: str) -> tuple[dict[str, Any], str]:
    """Return the schema of a call, and where in it that of the arguments is."""
    key = "parameters" if tool_format == "llama" else "arguments"
    root = f"/properties/{key}"
    schema = {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            key: _arguments(function.get("parameters"), root, param),
        },
        "required": ["name", key],
        "additionalProperties": False,
    }
    return schema, root


def _arguments(parameters: Any, root: str, param: str) -> dict[str, Any]:
    """Return the schema of a function's arguments, always an object; without parameters it takes none."""
    if parameters is None:
        return {"type": "object", "additionalProperties": False}
    fitted = _fitted(parameters, root, param)
    kinds = fitted.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise _Unfit("its type must be object", param)
    return fitted | {"type": "object"}


def _fitted(schema: Any, root: str, param: str) -> dict[str, Any]:
    try:
        fitted = schemas.fit(schema, root)
    except schemas.Unfit as error:
        raise _Unfit(error, param) from None
    if not isinstance(fitted, dict):
        raise _Unfit("it must be an object", param)
    return fitted


def _checked(rules: dict[str, str], parts: list[_Part]) -> str | _Refused:
    """See that the grammar compiles; when it does not, find out which schema it is."""
    text = lark.grammar(rules | {p.name: lark.document(p.schema) for p in parts})
    params = parts[0].param if len(parts) == 1 else parts[0].param.split("[")[0]
    if len(text) > MOST_BYTES:
        return _Refused(f"The schemas make a grammar of more than {MOST_BYTES} bytes.", params)
    reason = compiler.reason(text)
    if reason is None:
        return text
    if len(parts) == 1:
        return _Refused(f"The schema cannot be used: {_placed(parts[0], reason)}.", params)
    # Parts of what took too long may take as long each.
    for part in parts if reason != compiler.TOO_SLOW else ():
        if found := _alone(part.schema):
            return _Refused(f"The schema cannot be used: {_placed(part, found)}.", part.param)
    return _Refused(f"The schemas cannot be used together: {reason}.", params)


def _placed(part: _Part, reason: str) -> str:
    """Return a reason with its place in the user's schema, if that can be told."""
    said, _, place = reason.partition(" while processing json-schema:///#")  # the place of a reference
    if not place and reason not in compiler.OF_SIZE:
        place = places.find(part.schema, reason, _alone)
    inside = place.startswith(part.root) and len(place) > len(part.root)
    return f"{said} (at #{place.removeprefix(part.root):.200})" if inside else said


def _alone(schema: Any) -> str | None:
    """Return why a schema does not compile by itself, or None."""
    return compiler.reason(lark.grammar({"start": lark.document(schema)}))
