"""From JSON schemas to Arrow: the type that a value gets, and the value as that type holds it."""

from typing import Any

import orjson
import pyarrow as pa

_SCALARS = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}
_DEEPEST = 8
"""Deeper values are kept as JSON text."""


def arrow_type(schema: Any, root: dict[str, Any], above: tuple[Any, ...] = ()) -> pa.DataType:
    """Return the Arrow type of what a JSON schema describes; JSON text where it has none.

    `above` are the schemas that it lies in: one that contains itself has none, nor what is very deep.
    """
    schema = _plain(schema, root)
    if not isinstance(schema, dict) or len(above) > _DEEPEST or any(schema is outer for outer in above):
        return pa.string()
    inside = (*above, schema)
    match sorted(_kinds(schema, root)):
        case ["integer", "number"]:
            return pa.float64()
        case ["array"]:
            return pa.list_(arrow_type(schema.get("items"), root, inside))
        case ["object"] if schema.get("properties") and schema.get("additionalProperties") is False:
            properties = schema["properties"].items()
            return pa.struct([(name, arrow_type(inner, root, inside)) for name, inner in properties])
        case [kind]:
            return _SCALARS.get(kind, pa.string())
    return pa.string()


def _kinds(schema: Any, root: dict[str, Any]) -> set[str]:
    """Return the types that a value may have, null left out; empty: nothing is said."""
    schema = _plain(schema, root)
    if not isinstance(schema, dict):
        return set()
    said = schema.get("type")
    if isinstance(said, str | list):
        return ({said} if isinstance(said, str) else set(said)) - {"null"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return {_kind_of(value) for value in values if value is not None}
    # Of several alternatives only single values can share a column.
    found = [_kinds(option, root) for option in _options(schema, root)]
    kinds: set[str] = set().union(*found)
    return kinds if all(found) and kinds <= _SCALARS.keys() else set()


def _plain(schema: Any, root: dict[str, Any]) -> Any:
    """Follow references, and the only alternative there is to null."""
    for _ in range(_DEEPEST):
        schema = resolved(schema, root)
        if not isinstance(schema, dict) or "type" in schema or len(_options(schema, root)) != 1:
            break
        (schema,) = _options(schema, root)
    return schema


def _options(schema: dict[str, Any], root: dict[str, Any]) -> list[Any]:
    """Return the alternatives that a schema gives, null left out."""
    listed: list[Any] = next((schema[word] for word in ("anyOf", "oneOf", "allOf") if schema.get(word)), [])
    if "allOf" in schema and len(listed) > 1:
        return []
    found = [resolved(option, root) for option in listed]
    return [option for option in found if not isinstance(option, dict) or option.get("type") != "null"]


def _kind_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names[type(value)]


def properties(root: dict[str, Any]) -> dict[str, pa.DataType]:
    """Return the columns of the properties of an object; none for what is no object or lists none."""
    top = resolved(root, root)
    if top.get("type", "object") != "object":
        return {}
    return {name: arrow_type(schema, root) for name, schema in (top.get("properties") or {}).items()}


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Follow references inside the schema."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            return schema
        found: Any = root
        for step in schema["$ref"][2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return {}


def fitted(value: Any, kind: pa.DataType) -> Any:
    """Return a value as its type holds it: JSON text where it is no text, an integer of 3.0.

    An integer of more than 64 bits has none, and becomes null; forms have refused it before. Raises TypeError
    for what is of another type, as a pydantic model's validators may make it.
    """
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else orjson.dumps(value).decode()
    if pa.types.is_list(kind):
        return [fitted(item, kind.value_type) for item in _of(list, value)]
    if pa.types.is_struct(kind):
        found = _of(dict, value)
        return {inner.name: fitted(found.get(inner.name), inner.type) for inner in kind}
    if pa.types.is_boolean(kind):
        return _of(bool, value)
    if pa.types.is_float64(kind):
        return float(_number(value))
    whole = int(_number(value))
    if whole != value:
        raise TypeError(value)
    return whole if -(2**63) <= whole < 2**63 else None


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(value)
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return value
