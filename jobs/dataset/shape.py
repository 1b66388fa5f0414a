"""What a generation adds to its rows: columns, with types that follow from the schema; and who goes where."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jobs.dataset import generation, schema_types, state, validation
from jobs.dataset.input import source
from jobs.dataset.output import apart, json_rows

HIDDEN = "__longhaul_"
"""Columns whose names begin so are for the steps in between, and not published."""
ROW = f"{HIDDEN}row"
"""Which row of the whole input a record is of, where the input of a step is the output of another."""
GROUP = f"{HIDDEN}group"
"""Which row a step with several samples had: its samples have this in common."""
CHAT = (f"{HIDDEN}messages", f"{HIDDEN}output")
"""The prompt's messages and the text, for formats that hold conversations."""
_CUT = "cut by --max-tokens or the length of the context"
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


class Shape:
    """The records that a generation makes of its rows, as record batches.

    `output` names the column of the text. With a form there is one for each property of its object instead.
    `conversation` names a column for the prompt's messages with the output behind them; `chat` adds those of
    CHAT. A new column whose name is taken, by the input or by one before it, is called `output_NAME`.
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
        conversation: str | None = None,
        chat: bool = False,
        step: str = "generate",
    ) -> None:
        self._form, self._keep_invalid, self._step = form, keep_invalid, step
        replaced = {ROW, GROUP} if samples > 1 else {ROW}
        self._given = [name for name in given.names if name not in replaced]
        self._shown = [name for name in self._given if not name.startswith(HIDDEN)]
        self.takes_messages = chat or conversation is not None
        self._properties = form.columns if form else {}
        # A pipeline's steps have names; the columns of the one step that has none need no telling apart.
        prefix = "" if step == "generate" else f"{step}_"
        own = self._outputs(output)
        if chat:
            own += [(CHAT[0], MESSAGES, lambda record: record.messages), (CHAT[1], pa.string(), _text)]
        if conversation:
            own.append((conversation, MESSAGES, _conversation))
        if measured:
            own += [(prefix + name, kind, value) for name, kind, value in _MEASURED]
        if samples > 1:
            own.append((prefix + "sample", pa.int32(), lambda record: record.answer.sample))
            own.append((GROUP, pa.int64(), lambda record: record.answer.row))
        self._own = self._named(own)
        kept = [given.field(name) for name in self._given]
        self.schema = pa.schema([*kept, *((name, kind) for name, kind, _ in self._own)])

    def _outputs(self, output: str) -> list["_Column"]:
        """Return the columns of what the model wrote."""
        own: list[_Column] = [] if self._properties else [(output, pa.string(), _text)]
        own += [(name, kind, _property(name)) for name, kind in self._properties.items()]
        if self._keep_invalid:
            if self._properties:
                own.append(("output_text", pa.string(), _text))
            own.append(("valid", pa.bool_(), lambda record: record.output.valid))
        return own

    def _named(self, own: list["_Column"]) -> list["_Column"]:
        """Give each column a name that no other has."""
        taken, named = set(self._given), []
        for name, kind, value in own:
            while name in taken:
                name = f"output_{name}"
            taken.add(name)
            named.append((name, kind, value))
        return named

    @property
    def added(self) -> list[str]:
        """The names of the columns that it adds."""
        return [name for name, _, _ in self._own]

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
            record = self._record(answer, output, row, messages)
            (good if record.output.valid or self._keep_invalid else bad).append(record)
        invalid = [self._invalid(rows, record, place) for record in bad]
        return Records(self._good(rows, good), invalid, faults, sum(not one.output.valid for one in good))

    def _fault(self, answer: generation.Answer, row: int, place: str) -> apart.Fault:
        output = answer.output
        code, message = (
            ("row_unfit", answer.fault or "") if output is None else output.error or ("failed", "")
        )
        return apart.Fault(row, place, answer.sample, self._step, code, message)

    def _record(
        self,
        answer: generation.Answer,
        output: state.Output,
        row: int,
        messages: list[dict[str, str]] | None,
    ) -> "_Record":
        value: dict[str, Any] = {}
        if self._form is not None and output.valid and self._properties:
            try:
                value = self._form.read(output.text or "")
            except validation.Unfit as unfit:  # a model's own checks may have changed since it was made
                told = (validation.INVALID, str(unfit))
                output = dataclasses.replace(output, valid=False, error=told)
        return _Record(answer, output, row, value, messages)

    def _good(self, rows: source.Rows, records: list["_Record"]) -> source.Rows:
        """Return the input's columns of some records with the new ones beside them."""
        own = [
            pa.array([schema_types.fitted(value(record), kind) for record in records], kind)
            for _, kind, value in self._own
        ]
        taken = pa.array([record.answer.index for record in records], pa.int64())
        given = rows.batch.select(self._given).take(taken).columns
        numbers = pa.array([record.row for record in records], pa.int64())
        return source.Rows(numbers, pa.RecordBatch.from_arrays([*given, *own], schema=self.schema))

    def _invalid(self, rows: source.Rows, record: "_Record", place: Callable[[int], str]) -> apart.Invalid:
        shown = rows.batch.select(self._shown).slice(record.answer.index, 1)
        given = next(json_rows.rows(shown), {})
        told = (record.output.error or ("", ""))[1]
        if record.output.finish_reason == "length":
            told = f"{_CUT}: {told}"
        text, sample = record.output.text or "", record.answer.sample
        return apart.Invalid(record.row, place(record.row), sample, self._step, text, told, given)


@dataclass(frozen=True)
class Records:
    """What came of a batch of rows: its records, those without their form, and what failed."""

    good: source.Rows
    invalid: list[apart.Invalid]
    faults: list[apart.Fault]
    invalid_kept: int = 0
    """How many of the good ones are without their form, and stay all the same."""


@dataclass(frozen=True)
class _Record:
    answer: generation.Answer
    output: state.Output
    row: int
    value: dict[str, Any]
    messages: list[dict[str, str]] | None = None


_Column = tuple[str, pa.DataType, Callable[[_Record], Any]]
_MEASURED: list[_Column] = [
    ("finish_reason", pa.string(), lambda record: record.output.finish_reason),
    ("prompt_tokens", pa.int32(), lambda record: record.output.prompt_tokens),
    ("cached_tokens", pa.int32(), lambda record: record.output.cached_tokens),
    ("completion_tokens", pa.int32(), lambda record: record.output.completion_tokens),
    ("latency_seconds", pa.float64(), lambda record: record.output.latency_seconds),
]


def _text(record: _Record) -> str | None:
    return record.output.text


def _conversation(record: _Record) -> list[dict[str, str]]:
    assert record.messages is not None
    return [*record.messages, {"role": "assistant", "content": record.output.text or ""}]


def _property(name: str) -> Callable[[_Record], Any]:
    return lambda record: record.value.get(name)
