"""Rows of Arrow as JSON: nested values stay nested, and what JSON has no form for becomes text.

Dates, times and decimals are written as text, durations as numbers of their unit, bytes in base64. What is
not finite (NaN, infinity) becomes null.
"""

import base64
from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa

_ROWS = 500
_LINE_ENDS = {mark.encode(): b"\\u%04x" % ord(mark) for mark in "\x85\u2028\u2029"}
"""What Unicode takes for the end of a line, and some readers with it."""


def lines(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield each row as one line of JSON."""
    for row in rows(batch):
        yield encoded(row)


def rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield each row as an object. A few hundred rows are in memory as Python values at a time."""
    batch = batch.cast(schema(batch.schema))
    for start in range(0, batch.num_rows, _ROWS):
        yield from batch.slice(start, _ROWS).to_pylist()


def encoded(row: dict[str, Any]) -> bytes:
    """Return an object as a line of JSON, newline included, in which nothing else looks like a line's end."""
    line = orjson.dumps(row, default=_text, option=orjson.OPT_APPEND_NEWLINE)
    for mark, escaped in _LINE_ENDS.items():
        line = line.replace(mark, escaped)
    return line


def schema(wanted: pa.Schema) -> pa.Schema:
    """Return the schema that rows are cast to before they are written as JSON."""
    return pa.schema([field.with_type(_plain(field.type)) for field in wanted])


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return pa.string()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    return kind


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)
