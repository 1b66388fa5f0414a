"""What a generation adds to its rows: columns, with types that follow from the schema; and who goes where."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from jobs.dataset import apart, generation, source, state, validation

HIDDEN = "__longhaul_"
"""Columns whose names begin so are for the steps in between, and not published."""
ROW = f"{HIDDEN}row"
"""Which row of the whole input a record is of, where the input of a step is the output of another."""
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SCALARS = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}
_DEEPEST = 8
"""Deeper values are kept as JSON text."""


class Shape:
    """The records that a generation makes of its rows, as record batches.

    `output` names the column of the text. With a form there is one column for each property of its object instead.
    `messages` and `conversation` name columns for the prompt's messages, and for those with the output behind them.
    A new column whose name the input has already is called `output_NAME`.
    """

    def __init__(
        self,
        given: pa.Schema,
        *,
        form: validation.Form | None,
        samples: int,
        keep_invalid: bool = False,
        output: str = "output",
        measured: bool = True,
        messages: str | None = None,
        conversation: str | None = None,
        step: str = "generate",
    ) -> None:
        self._form, self._keep_invalid, self._step = form, keep_invalid, step
        self._given = [name for name in given.names if name != ROW]
        self._shown = [name for name in self._given if not name.startswith(HIDDEN)]
        self.takes_messages = bool(messages or conversation)
        self._properties = _properties(form)
        # A pipeline's steps have names; the columns of the one step that has none need no telling apart.
        prefix = "" if step == "generate" else f"{step}_"
        own: list[tuple[str, pa.DataType, Callable[[_Record], Any]]] = []
        if not self._properties:
            own.append((output, pa.string(), lambda record: record.output.text))
        for name, schema in self._properties.items():
            own.append((name, arrow_type(schema, form.schema if form else {}), _property(name)))
        if keep_invalid:
            if self._properties:
                own.append(("output_text", pa.string(), lambda record: record.output.text))
            own.append(("valid", pa.bool_(), lambda record: record.output.valid))
        if messages:
            own.append((messages, MESSAGES, lambda record: record.messages))
        if conversation:
            own.append((conversation, MESSAGES, _conversation))
        if measured:
            own += [(prefix + name, kind, value) for name, kind, value in _MEASURED]
        if samples > 1:
            own.append((prefix + "sample", pa.int32(), lambda record: record.answer.sample))
        self._own = [(self._free(name), kind, value) for name, kind, value in own]
        kept = [given.field(name) for name in self._given]
        self.schema = pa.schema([*kept, *((name, kind) for name, kind, _ in self._own)])

    @property
    def added(self) -> list[str]:
        """The names of the columns that it adds."""
        return [name for name, _, _ in self._own]

    def _free(self, name: str) -> str:
        while name in self._given:
            name = f"output_{name}"
        return name

    def records(
        self,
        rows: source.Rows,
        answers: Sequence[generation.Answer],
        place: Callable[[int], str],
        rendered: Callable[[int], list[dict[str, str]]] | None = None,
    ) -> "Records":
        """Return what came of a batch; `rendered` gives the messages of a row by its place in the batch."""
        numbers = rows.batch[ROW].to_pylist() if ROW in rows.batch.schema.names else rows.numbers.to_pylist()
        good: list[_Record] = []
        bad: list[_Record] = []
        faults = []
        for answer in answers:
            output, row = answer.output, numbers[answer.index]
            if output is None or output.text is None:
                faults.append(self._fault(answer, row, place(row)))
                continue
            messages = rendered(answer.index) if rendered is not None else None
            record = _Record(answer, output, row, self._value(output), messages)
            (good if output.valid or self._keep_invalid else bad).append(record)
        return Records(self._good(rows, good), [self._invalid(rows, record, place) for record in bad], faults)

    def _fault(self, answer: generation.Answer, row: int, place: str) -> apart.Fault:
        output = answer.output
        code, message = (
            ("row_unfit", answer.fault or "") if output is None else output.error or ("failed", "")
        )
        return apart.Fault(row, place, answer.sample, self._step, code, message)

    def _value(self, output: state.Output) -> dict[str, Any]:
        if self._form is None or not output.valid or not self._properties:
            return {}
        value: dict[str, Any] = self._form.read(output.text or "")
        return value

    def _good(self, rows: source.Rows, records: list["_Record"]) -> source.Rows:
        """Return the input's columns of some records with the new ones beside them."""
        own = [
            pa.array([_fitted(value(record), kind) for record in records], kind)
            for _, kind, value in self._own
        ]
        taken = pa.array([record.answer.index for record in records], pa.int64())
        given = rows.batch.select(self._given).take(taken).columns
        numbers = pa.array([record.row for record in records], pa.int64())
        return source.Rows(numbers, pa.RecordBatch.from_arrays([*given, *own], schema=self.schema))

    def _invalid(self, rows: source.Rows, record: "_Record", place: Callable[[int], str]) -> apart.Invalid:
        (given,) = rows.batch.select(self._shown).slice(record.answer.index, 1).to_pylist()
        told = (record.output.error or ("", ""))[1]
        text, sample = record.output.text or "", record.answer.sample
        return apart.Invalid(record.row, place(record.row), sample, self._step, text, told, given)


@dataclass(frozen=True)
class Records:
    """What came of a batch of rows: its records, those without their form, and what failed."""

    good: source.Rows
    invalid: list[apart.Invalid]
    faults: list[apart.Fault]


@dataclass(frozen=True)
class _Record:
    answer: generation.Answer
    output: state.Output
    row: int
    value: dict[str, Any]
    messages: list[dict[str, str]] | None = None


_MEASURED: list[tuple[str, pa.DataType, Callable[[_Record], Any]]] = [
    ("finish_reason", pa.string(), lambda record: record.output.finish_reason),
    ("prompt_tokens", pa.int32(), lambda record: record.output.prompt_tokens),
    ("cached_tokens", pa.int32(), lambda record: record.output.cached_tokens),
    ("completion_tokens", pa.int32(), lambda record: record.output.completion_tokens),
    ("latency_seconds", pa.float64(), lambda record: record.output.latency_seconds),
]


def arrow_type(schema: Any, root: dict[str, Any], depth: int = 0) -> pa.DataType:
    """Return the Arrow type of what a JSON schema describes; JSON text where it has none."""
    schema = _resolved(schema, root)
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return pa.string()
    kinds = _kinds(schema, root)
    if kinds == {"integer", "number"}:
        return pa.float64()
    if len(kinds) != 1:
        return pa.string()
    (kind,) = kinds
    if kind == "array":
        return pa.list_(arrow_type(schema.get("items"), root, depth + 1))
    if kind == "object":
        properties = schema.get("properties")
        if not properties or schema.get("additionalProperties") is not False:
            return pa.string()
        return pa.struct([(name, arrow_type(inner, root, depth + 1)) for name, inner in properties.items()])
    return _SCALARS.get(kind, pa.string())


def _kinds(schema: dict[str, Any], root: dict[str, Any]) -> set[str]:
    """Return the types that a value may have, null left out; empty: nothing is said."""
    said = schema.get("type")
    if isinstance(said, str | list):
        return {said} - {"null"} if isinstance(said, str) else set(said) - {"null"}
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        inner = [_resolved(option, root) for option in options]
        found = [_kinds(option, root) for option in inner if isinstance(option, dict)]
        return (
            set().union(*found)
            if all(option.get("type") in (*_SCALARS, "null") for option in inner)
            else set()
        )
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return {_kind_of(value) for value in values if value is not None}


def _kind_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names[type(value)]


def _resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Follow a reference inside the schema."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            return schema
        found: Any = root
        for step in schema["$ref"][2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return {}


def _properties(form: validation.Form | None) -> dict[str, Any]:
    if form is None:
        return {}
    top = _resolved(form.schema, form.schema)
    if top.get("type", "object") != "object":
        return {}
    return dict(top.get("properties") or {})


def _conversation(record: _Record) -> list[dict[str, str]]:
    assert record.messages is not None and record.output.text is not None
    return [*record.messages, {"role": "assistant", "content": record.output.text}]


def _property(name: str) -> Callable[[_Record], Any]:
    return lambda record: record.value.get(name)


def _fitted(value: Any, kind: pa.DataType) -> Any:
    """Return a value as its type can hold it: JSON text where it is no text, a number that is not too large."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else orjson.dumps(value).decode()
    if pa.types.is_int64(kind):
        # 3.0 is an integer to JSON Schema.
        return int(value) if -(2**63) <= value < 2**63 else None
    if pa.types.is_float64(kind):
        return float(value) if abs(value) < math.inf else None
    if pa.types.is_list(kind):
        return [_fitted(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {
            kind.field(i).name: _fitted(value.get(kind.field(i).name), kind.field(i).type)
            for i in range(kind.num_fields)
        }
    return value
