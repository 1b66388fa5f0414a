"""Files of one JSON object a line. The columns are the keys of all lines, found by reading the file once."""

import json
from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa

from jobs.dataset.input import input_errors, json_types, places, reader_lines, text_lines

_MOST_KEYS = 10_000
_DEEPEST = 200
_MOST_BYTES_OF_A_LINE_SHOWN = 60


class Reader(reader_lines.LineReader):
    """Reads a file of JSON lines, plain or compressed.

    A key that a line lacks is null. A column whose values have no common type is text: strings as they are,
    the rest as JSON. NaN and Infinity, which Python writes, are numbers.
    """

    def __init__(self, file: places.File) -> None:
        super().__init__(file)
        self._check_array()
        self.schema = self._found_schema()

    def _batch(self, values: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
        try:
            columns = [
                json_types.array([value.get(field.name) for value in values], field.type) for field in schema
            ]
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise input_errors.InputChanged(where=self.shown, reason=error) from None
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _records(self, bad: text_lines.OnBad) -> Iterator[text_lines.Record]:
        position = number = 0
        try:
            for number, line in enumerate(text_lines.lines(self._file), 1):
                if line is not None and (not line or line.isspace()):
                    continue
                self._marks.note(position, number)
                record, problem = _parsed(line)
                if problem is None:
                    yield position, record, len(line or b"")
                else:
                    bad(position, number, problem)
                position += 1
        except text_lines.CutShort as error:
            bad(position, number + 1, f"the file breaks off here, what follows is lost: {error}")
            position += 1
        self.count = position

    def _found_schema(self) -> pa.Schema:
        """Read the whole file, and find each column's type. Raises InputUnreadable if no line is a record."""
        types: dict[str, pa.DataType] = {}
        problems: list[str] = []

        def bad(position: int, line: int, message: str) -> None:
            if not problems:
                problems.append(f"no line of it is a JSON object; line {line}: {message}")

        for _, values in text_lines.batches(self._records(bad)):
            self._learn(types, values)
        if problems and not types:
            raise input_errors.InputUnreadable(where=self.shown, reason=problems[0])
        return pa.schema([(name, json_types.storable(type)) for name, type in types.items()])

    def _learn(self, types: dict[str, pa.DataType], values: list[dict[str, Any]]) -> None:
        for name in dict.fromkeys(key for value in values for key in value):
            known = types.get(name)
            if known == json_types.TEXT:
                continue
            found = json_types.of([value.get(name) for value in values])
            types[name] = found if known is None else json_types.merged(known, found)
        if len(types) > _MOST_KEYS:
            reason = f"its lines have more than {_MOST_KEYS} different keys, which cannot be columns"
            raise input_errors.InputUnreadable(where=self.shown, reason=reason)

    def _check_array(self) -> None:
        with text_lines.stream(self._file) as opened:
            start = opened.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith(b"["):
            reason = "it is one JSON array; make lines of it with: jq -c '.[]'"
            raise input_errors.InputUnreadable(where=self.shown, reason=reason)


def _parsed(line: bytes | None) -> tuple[dict[str, Any], str | None]:
    """Return the object on a line, and what is wrong with the line if something is."""
    if line is None:
        return {}, f"the line has more than {text_lines.LONGEST >> 20} MiB"
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        value = _lenient(line)
        if value is None:
            return {}, f"not JSON: {error}"
    if not isinstance(value, dict):
        return {}, f"not a JSON object: {_start(line)}"
    if line.count(b"[") + line.count(b"{") > _DEEPEST and _deeper(value, _DEEPEST):
        return {}, f"a value is nested more than {_DEEPEST} deep"
    return value, None


def _deeper(value: Any, limit: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return limit == 0 or any(_deeper(item, limit - 1) for item in items)


def _lenient(line: bytes) -> Any:
    """Return what Python's own reader makes of a line with NaN or Infinity; None: nothing."""
    if b"NaN" not in line and b"Infinity" not in line:
        return None
    try:
        value = json.loads(line)
        orjson.dumps(value)  # refuses text that is no Unicode
    except (ValueError, TypeError, RecursionError):
        return None
    return value


def _start(line: bytes) -> str:
    shown = line[:_MOST_BYTES_OF_A_LINE_SHOWN].decode(errors="replace")
    return shown if len(line) <= _MOST_BYTES_OF_A_LINE_SHOWN else f"{shown} ..."
