"""Types of columns from schemas, and values in them."""

import datetime
from typing import Any, Literal, Optional

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from jobs.dataset import schema_types, validation

TEXT, INTEGER, NUMBER = pa.string(), pa.int64(), pa.float64()


class Leaf(BaseModel):
    label: Literal["a", "b"]
    weight: float | None = None


class Model(BaseModel):
    leaf: Leaf
    maybe: Leaf | None
    leaves: list[Leaf] | None = None
    numbers: list[int]
    either: int | str
    wide: int | float
    when: datetime.date
    pair: tuple[int, str]
    free: dict[str, int]
    yes: bool = True
    tree: Optional["Tree"] = None


class Tree(BaseModel):
    left: "Tree | None" = None
    right: "Tree | None" = None
    name: str


LEAF = pa.struct([("label", TEXT), ("weight", NUMBER)])


def test_a_model_of_pydantic_has_a_column_of_its_own_type_for_each_field() -> None:
    form = validation.form(Model)
    assert form is not None
    found = {
        name: schema_types.arrow_type(schema, form.schema)
        for name, schema in form.schema["properties"].items()
    }
    assert found == {
        "leaf": LEAF,
        "maybe": LEAF,
        "leaves": pa.list_(LEAF),
        "numbers": pa.list_(INTEGER),
        "either": TEXT,
        "wide": NUMBER,
        "when": TEXT,
        "pair": pa.list_(TEXT),
        "free": TEXT,
        "yes": pa.bool_(),
        # What contains itself has no type: text from there on.
        "tree": pa.struct([("left", TEXT), ("right", TEXT), ("name", TEXT)]),
    }


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({}, TEXT),
        (True, TEXT),
        ({"type": "null"}, TEXT),
        ({"type": ["integer", "null"]}, INTEGER),
        ({"type": ["integer", "string"]}, TEXT),
        ({"type": ["number", "integer", "null"]}, NUMBER),
        ({"enum": ["a", "b", None]}, TEXT),
        ({"enum": [1, 2]}, INTEGER),
        ({"enum": [1, 2.5]}, NUMBER),
        ({"enum": [1, "a"]}, TEXT),
        ({"enum": [True, False]}, pa.bool_()),
        ({"const": 5}, INTEGER),
        ({"const": {"a": 1}}, TEXT),
        ({"anyOf": [{"const": "a"}, {"const": "b"}]}, TEXT),
        ({"anyOf": [{"type": "integer"}, {"enum": [1.5]}, {"type": "null"}]}, NUMBER),
        ({"anyOf": [{"type": "integer"}, {}]}, TEXT),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}]}, TEXT),
        ({"oneOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, INTEGER),
        ({"allOf": [{"$ref": "#/$defs/n"}], "description": "x"}, INTEGER),
        ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, TEXT),
        ({"$ref": "#/$defs/n"}, INTEGER),
        ({"$ref": "#/$defs/a~1b"}, pa.bool_()),
        ({"$ref": "#/$defs/none"}, TEXT),
        ({"$ref": "#/$defs/round"}, TEXT),
        ({"type": "array"}, pa.list_(TEXT)),
        (
            {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            pa.list_(pa.list_(NUMBER)),
        ),
        ({"type": "object"}, TEXT),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, TEXT),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
            pa.struct([("a", INTEGER)]),
        ),
    ],
)
def test_a_schema_has_a_type_or_its_values_are_json_text(schema: Any, kind: pa.DataType) -> None:
    root = {
        "$defs": {"n": {"type": "integer"}, "a/b": {"type": "boolean"}, "round": {"$ref": "#/$defs/round"}}
    }
    assert schema_types.arrow_type(schema, root) == kind


def test_what_is_very_deep_is_text_and_many_references_to_itself_take_no_time() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(30):
        deep = {"type": "array", "items": deep}
    kind = schema_types.arrow_type(deep, deep)
    while pa.types.is_list(kind):
        kind = kind.value_type
    assert kind == TEXT
    names = [f"n{i}" for i in range(20)]
    root: dict[str, Any] = {"type": "object", "additionalProperties": False}
    root["properties"] = {name: {"$ref": "#"} for name in names}
    assert schema_types.arrow_type(root, root).num_fields == 20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_any_value_is_kept_as_text_that_gives_it_back(value: Any) -> None:
    kept = schema_types.fitted(value, TEXT)
    assert value == (kept if isinstance(value, str) or value is None else orjson.loads(kept))


@pytest.mark.parametrize(
    ("value", "kind", "kept"),
    [
        (3.0, INTEGER, 3),
        (2**63, INTEGER, None),
        (3, NUMBER, 3.0),
        (2**63, NUMBER, float(2**63)),
        (True, pa.bool_(), True),
        ([1, None, {"a": [2]}], pa.list_(TEXT), ["1", None, '{"a":[2]}']),
        ([[1.0], None], pa.list_(pa.list_(INTEGER)), [[1], None]),
        ({"weight": 1, "more": 2}, LEAF, {"label": None, "weight": 1.0}),
        (None, LEAF, None),
    ],
)
def test_a_value_goes_into_its_column_whole(value: Any, kind: pa.DataType, kept: Any) -> None:
    found = schema_types.fitted(value, kind)
    assert pa.array([found], kind).to_pylist() == [kept]
