"""Arrow types of JSON values: one type for all values of a column, or text where there is none."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pyarrow as pa

TEXT = pa.string()
_MOST_FIELDS = 1000
_DEEPEST = 32


def of(values: Sequence[Any]) -> pa.DataType:
    """Return the type that holds these values; text when only JSON text holds them all."""
    try:
        found = pa.array(values).type
    except (pa.ArrowException, OverflowError, RecursionError):
        return (
            pa.float64()
            if all(map(_number, values)) and any(isinstance(it, float) for it in values)
            else TEXT
        )
    mixed = _has(pa.types.is_floating, found) and any(_true_for_number(value, found) for value in values)
    return found if _bounded(found) and not mixed else TEXT


def merged(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type that holds what either holds: a wider number, a struct of both's keys, else text."""
    wider = _wider(one, other)
    return wider if wider is not None and _bounded(wider) else TEXT


def storable(type: pa.DataType) -> pa.DataType:
    """Return the type, or text for one that has a struct without fields: Parquet cannot hold that."""
    return TEXT if _has(_is_empty, type) else type


def array(values: Sequence[Any], type: pa.DataType) -> pa.Array:
    """Return values of JSON as an array of a type that `of` and `merged` found for them."""
    if type == TEXT:
        return pa.array([_text(value) for value in values], TEXT)
    try:
        return pa.array(values, type)
    except pa.ArrowInvalid:  # an integer that no float64 holds exactly, among fractions
        return pa.array([_fitted(value, type) for value in values], type)


def _number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _true_for_number(value: Any, type: pa.DataType) -> bool:
    """Return whether true or false stands where Arrow found a float64: it takes true for 1.0."""
    if pa.types.is_floating(type):
        return isinstance(value, bool)
    if isinstance(value, list) and pa.types.is_list(type):
        return any(_true_for_number(item, type.value_type) for item in value)
    if isinstance(value, dict) and pa.types.is_struct(type):
        return any(_true_for_number(value.get(field.name), field.type) for field in type)
    return False


def _fitted(value: Any, type: pa.DataType) -> Any:
    if isinstance(value, list) and pa.types.is_list(type):
        return [_fitted(item, type.value_type) for item in value]
    if isinstance(value, dict) and pa.types.is_struct(type):
        return {field.name: _fitted(value.get(field.name), field.type) for field in type}
    return float(value) if isinstance(value, int) and pa.types.is_floating(type) else value


def _bounded(type: pa.DataType, depth: int = 0) -> bool:
    if depth > _DEEPEST:
        return False
    if pa.types.is_struct(type):
        return type.num_fields <= _MOST_FIELDS and all(_bounded(field.type, depth + 1) for field in type)
    return not pa.types.is_list(type) or _bounded(type.value_type, depth + 1)


def _has(wanted: Callable[[pa.DataType], bool], type: pa.DataType) -> bool:
    """Return whether a type is one of some kind, or a type within it is."""
    inner = [field.type for field in type] if pa.types.is_struct(type) else []
    if pa.types.is_list(type):
        inner = [type.value_type]
    return wanted(type) or any(_has(wanted, each) for each in inner)


def _is_empty(type: pa.DataType) -> bool:
    return bool(pa.types.is_struct(type) and type.num_fields == 0)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    text = orjson.dumps(value, default=str).decode()
    return None if text == "null" else text  # NaN, which Python writes for what is missing


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        inner = _wider(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _struct(one, other)
    return None


def _struct(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    fields = {field.name: field.type for field in one}
    for field in other:
        kind = _wider(fields[field.name], field.type) if field.name in fields else field.type
        if kind is None:
            return None
        fields[field.name] = kind
    return pa.struct(list(fields.items()))
