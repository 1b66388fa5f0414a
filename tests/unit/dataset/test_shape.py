"""Records of a generation: which columns they have, and who goes where."""

import datetime
from typing import Any

import orjson
import pyarrow as pa
import pytest

from jobs.dataset import generation, shape, state, validation
from jobs.dataset.input import rows
from jobs.dataset.output import apart

GIVEN = pa.schema([("id", pa.int64()), ("text", pa.string())])
MEASURED = ["finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "latency_seconds"]
SCORE = {"type": "object", "properties": {"score": {"type": "integer"}, "why": {"type": "string"}}}


def made(given: pa.Schema = GIVEN, *, schema: Any = None, samples: int = 1, **options: Any) -> shape.Shape:
    return shape.Shape(given, form=validation.form(schema), samples=samples, **options)


def batch(**columns: Any) -> rows.Rows:
    given = {"id": [7, 8, 9], "text": ["a", "b", "c"]} | columns
    return rows.Rows(rows.numbers([20, 30, 40]), pa.RecordBatch.from_pydict(given))


def answer(index: int, text: str | None, sample: int = 0, **output: Any) -> generation.Answer:
    return generation.Answer(index, 20 + 10 * index, sample, state.Output(text, **output), None)


def place(row: int) -> str:
    return f"line {row}"


def test_the_input_stays_and_the_output_with_what_it_took_comes_behind_it() -> None:
    one = made()
    assert one.schema.names == ["id", "text", "output", *MEASURED]
    output = {"finish_reason": "stop", "prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": 1}
    given = answer(1, "B", latency_seconds=0.5, **output)
    found = one.records(batch(), [given], place)
    assert found.good.numbers.to_pylist() == [30]
    assert found.good.batch.to_pylist() == [
        {"id": 8, "text": "b", "output": "B", "latency_seconds": 0.5} | output
    ]
    assert (found.invalid, found.faults) == ([], [])


def test_samples_of_a_row_have_its_columns_each_and_their_number() -> None:
    one = made(samples=2, measured=False)
    answers = [answer(0, "x", 0), answer(0, "y", 1), answer(2, "z", 1)]
    good = one.records(batch(), answers, place).good.batch
    assert good.drop_columns([shape.GROUP]).to_pylist() == [
        {"id": 7, "text": "a", "output": "x", "sample": 0},
        {"id": 7, "text": "a", "output": "y", "sample": 1},
        {"id": 9, "text": "c", "output": "z", "sample": 1},
    ]


def test_a_schema_makes_a_column_of_each_property_and_none_of_the_text() -> None:
    one = made(schema=SCORE, measured=False)
    assert one.schema.field("score").type == pa.int64()
    text = orjson.dumps({"score": 3.0, "why": "é"}).decode()
    found = one.records(batch(), [answer(0, text), answer(1, "{}")], place).good.batch
    assert found.to_pylist() == [
        {"id": 7, "text": "a", "score": 3, "why": "é"},
        {"id": 8, "text": "b", "score": None, "why": None},
    ]


@pytest.mark.parametrize("schema", [{"type": "array"}, {"type": "object"}, {"anyOf": [SCORE]}])
def test_an_output_without_properties_is_kept_as_text(schema: Any) -> None:
    assert made(schema=schema, measured=False).schema.names == ["id", "text", "output"]


def test_no_column_has_the_name_of_another() -> None:
    given = pa.schema([(name, pa.string()) for name in ("output", "output_output", "sample", "id")])
    names = made(given, samples=2).schema.names
    assert names[4:] == ["output_output_output", *MEASURED, "output_sample", shape.GROUP]
    properties = {
        name: {"type": "string"} for name in ("finish_reason", "valid", "output_text", "sample", "id")
    }
    form = {"type": "object", "properties": properties}
    names = made(schema=form, samples=2, keep_invalid=True).schema.names
    assert len(set(names)) == len(names)
    assert names[:7] == ["id", "text", "finish_reason", "valid", "output_text", "sample", "output_id"]
    assert made(schema=form).records(batch(), [answer(0, '{"id": "x"}')], place).good.batch.to_pylist()[
        0
    ] == (
        {"id": 7, "text": "a", "output_id": "x", "latency_seconds": None}
        | dict.fromkeys(("finish_reason", "valid", "output_text", "sample", "output_finish_reason"), None)
        | dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"), 0)
    )


def test_columns_of_a_named_step_carry_its_name() -> None:
    names = made(samples=2, step="ask", output="question").schema.names
    assert names[2:] == ["question", *(f"ask_{name}" for name in MEASURED), "ask_sample", shape.GROUP]


def test_a_column_of_the_input_that_begins_with_underscores_stays() -> None:
    given = pa.schema([("__index_level_0__", pa.int64()), ("__row", pa.int64())])
    assert made(given, measured=False).schema.names == ["__index_level_0__", "__row", "output"]
    some = rows.Rows(rows.numbers([5]), pa.RecordBatch.from_pydict({"__index_level_0__": [1], "__row": [2]}))
    assert made(given, measured=False).records(some, [answer(0, "x")], place).good.numbers.to_pylist() == [5]


def test_rows_of_a_later_step_keep_the_numbers_that_they_have_in_the_input() -> None:
    given = GIVEN.append(pa.field(shape.ROW, pa.int64()))
    one = made(given, measured=False, schema=SCORE)
    some = batch(**{shape.ROW: [101, 102, 103]})
    found = one.records(some, [answer(2, "{}"), answer(0, "no", valid=False)], place)
    assert found.good.numbers.to_pylist() == [103]
    assert shape.ROW not in found.good.batch.schema.names
    assert (found.invalid[0].row, found.invalid[0].place) == (101, "line 101")
    assert found.invalid[0].input == {"id": 7, "text": "a"}


def test_what_failed_and_what_was_never_asked_is_told_by_row_and_step() -> None:
    lost = answer(0, None, 1, error=("worker_lost", "gone"))
    unfit = generation.Answer(1, 30, 0, None, "text is null")
    found = made(step="ask").records(batch(), [lost, unfit, answer(2, "x")], place)
    assert found.good.batch.num_rows == 1
    assert found.faults == [
        apart.Fault(20, "line 20", 1, "ask", "worker_lost", "gone"),
        apart.Fault(30, "line 30", 0, "ask", "row_unfit", "text is null"),
    ]


def test_an_output_without_its_form_is_apart_with_its_row_or_marked() -> None:
    wrong = answer(0, "oops", 1, valid=False, error=("invalid_output", "not JSON"))
    right = answer(1, '{"score": 1, "why": "x"}')
    found = made(schema=SCORE, samples=2).records(batch(), [wrong, right], place)
    assert found.invalid == [
        apart.Invalid(20, "line 20", 1, "generate", "oops", "not JSON", {"id": 7, "text": "a"})
    ]
    assert found.good.batch.num_rows == 1
    kept = made(schema=SCORE, keep_invalid=True, measured=False).records(batch(), [wrong, right], place)
    assert kept.invalid == []
    assert [(row["score"], row["output_text"], row["valid"]) for row in kept.good.batch.to_pylist()] == [
        (None, "oops", False),
        (1, '{"score": 1, "why": "x"}', True),
    ]


def test_an_invalid_output_that_was_cut_says_so_first() -> None:
    said: dict[str, Any] = {"valid": False, "error": ("invalid_output", "not JSON")}
    answers = [answer(at, "{", finish_reason=why, **said) for at, why in enumerate(("length", "stop"))]
    cut, whole = made(schema=SCORE).records(batch(), answers, place).invalid
    assert cut.error == "cut by --max-tokens or the length of the context: not JSON"
    assert whole.error == "not JSON"


def test_an_output_that_a_model_no_longer_takes_is_invalid_now() -> None:
    found = made(schema=SCORE).records(batch(), [answer(0, '{"score": "high"}')], place)
    assert found.good.batch.num_rows == 0
    assert "'high' is not of type 'integer'" in found.invalid[0].error


def test_a_row_of_any_type_can_be_kept_apart_and_its_numbers_are_exact() -> None:
    when = pa.array([1_700_000_000_000_000_001] * 3, pa.timestamp("ns"))
    blob = pa.array([b"\xff"] * 3, pa.binary())
    day = pa.array([datetime.date(2024, 1, 2)] * 3)
    some = batch(when=when, blob=blob, day=day)
    wrong = answer(0, "x", valid=False)
    found = made(some.batch.schema, schema=SCORE).records(some, [wrong], place)
    assert found.invalid[0].input["when"].startswith("2023-11-14 22:13:20.000000001")
    assert orjson.dumps(found.invalid[0].input, default=str)


def test_messages_and_conversations_are_columns_for_who_needs_them() -> None:
    one = made(chat=True, conversation="talk", measured=False)
    assert one.takes_messages
    prompt = [{"role": "user", "content": "a"}]
    found = one.records(batch(), [answer(0, "A")], place, lambda index: prompt)
    assert found.good.batch[shape.CHAT[0]].to_pylist() == [prompt]
    assert found.good.batch["talk"].to_pylist() == [[*prompt, {"role": "assistant", "content": "A"}]]
    assert one.added == ["output", *shape.CHAT, "talk"]
    assert not made().takes_messages


def test_a_batch_without_any_answer_has_the_columns_all_the_same() -> None:
    found = made(schema=SCORE).records(batch(), [], place)
    assert found.good.batch.num_rows == 0
    assert found.good.batch.schema == made(schema=SCORE).schema
