"""Forms: what an output must be, from a schema, a file or a model."""

import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import pytest
from pydantic import AfterValidator, BaseModel, Field, RootModel, create_model

from jobs.dataset import validation


class Inner(BaseModel):
    label: str


class Tags(BaseModel):
    kind: str = Field(alias="type")
    score: int = Field(ge=1, le=5)
    inner: Inner | None = None
    others: list[Inner] = []


def _no_five(value: int) -> int:
    if value == 5:
        raise RuntimeError("five is out")
    assert value != 4, "four is out"
    return value


class Picky(BaseModel):
    n: "int"
    m: int


Picky.model_fields["n"].metadata.append(AfterValidator(_no_five))
Picky.model_rebuild(force=True)


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 3}', {"a": 3}),
        (' {"a": 3.0}\n', {"a": 3}),
        ("{}", {}),
        (f'{{"a": {2**63 - 1}}}', {"a": 2**63 - 1}),
        (f'{{"a": {-(2**63)}}}', {"a": -(2**63)}),
    ],
)
def test_an_output_of_the_form_is_read(text: str, value: Any) -> None:
    assert validation.Form(object_of(a={"type": "integer"}), "given").read(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ('{"a": 1', "not JSON"),
        ('```json\n{"a": 1}\n```', "not JSON"),
        ('{"a": NaN}', "not JSON"),
        ('{"a": 1e999}', "not JSON"),
        ("[]", r"^\$: .*'object'"),
        ('{"a": true}', r"^\$\.a: .*'integer'"),
        ('{"a": "3"}', r"^\$\.a: .*'integer'"),
        ('{"a": 2.5}', r"^\$\.a: .*'integer'"),
        ('{"a": null}', r"^\$\.a: "),
        ('{"a": 1, "b": 2}', "'b' was unexpected"),
        (f'{{"a": {2**63}}}', r"^\$\.a: "),
        (f'{{"a": {2**70}}}', r"^\$\.a: "),
        ('{"a": 1e300}', r"^\$\.a: "),
    ],
)
def test_an_output_of_another_form_is_refused_with_the_place(text: str, words: str) -> None:
    with pytest.raises(validation.Unfit, match=words):
        validation.Form(object_of(a={"type": "integer"}), "given").read(text)


def test_what_is_said_of_an_output_is_short() -> None:
    with pytest.raises(validation.Unfit) as caught:
        validation.Form({"type": "integer"}, "given").read(orjson.dumps("x" * 10_000).decode())
    assert len(str(caught.value)) <= 500


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nope"}, "'nope' is not valid"),
        (object_of(a={"$ref": "#/$defs/none"}), "none"),
        (object_of(a={"$ref": "http://127.0.0.1:1/x"}), "127.0.0.1"),
        (object_of(a={"type": "string", "pattern": "("}), "regex"),
        (object_of(a={"type": "integer", "maximum": 2**70}), "64-bit"),
        ({"type": "object", 1: 2}, "must be str"),
        ({"sentiment": "string"}, r"no keyword of JSON Schema, but sentiment\..*properties"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_before_any_work(schema: Any, reason: str) -> None:
    with pytest.raises(validation.SchemaWrong, match=f"^The schema given cannot be used: .*{reason}"):
        validation.form(schema)


def test_objects_are_closed_at_every_depth_unless_they_say_otherwise() -> None:
    inner = object_of(x={"type": "integer"})
    shut = inner | {"additionalProperties": False}
    assert validation.closed(object_of(a={"type": "array", "items": inner}, b={"anyOf": [inner]})) == (
        object_of(a={"type": "array", "items": shut}, b={"anyOf": [shut]}) | {"additionalProperties": False}
    )
    for also in ({"additionalProperties": True}, {"patternProperties": {}}, {"anyOf": []}, {"$ref": "#"}):
        assert validation.closed(inner | also) == inner | also
    assert validation.closed({"allOf": [inner]}) == {"allOf": [inner]}
    assert validation.closed({"$defs": {"n": inner}}) == {"$defs": {"n": shut}}


def test_names_of_properties_are_not_taken_for_words_of_the_schema() -> None:
    inner = object_of(x={"type": "integer"})
    shut = inner | {"additionalProperties": False}
    for name in ("properties", "default", "enum", "const", "examples", "allOf", "$ref"):
        assert validation.closed(object_of(**{name: inner})) == (
            object_of(**{name: shut}) | {"additionalProperties": False}
        )


def test_what_is_a_value_in_a_schema_stays_as_it_is() -> None:
    value = {"properties": {"a": 1}}
    schema = {"enum": [value], "default": value, "const": value, "examples": [value]}
    assert validation.closed(schema) == schema


def test_a_model_reads_outputs_by_the_names_that_its_schema_has() -> None:
    form = validation.form(Tags)
    assert form is not None
    assert list(form.schema["properties"]) == ["type", "score", "inner", "others"]
    assert form.read('{"type": "a", "score": 2.0, "others": [{"label": "x"}]}') == {
        "type": "a",
        "score": 2,
        "inner": None,
        "others": [{"label": "x"}],
    }
    with pytest.raises(validation.Unfit, match=r"\$\.score: 9"):
        form.read('{"type": "a", "score": 9}')


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"n": 4, "m": 1}', "^n: .*four is out"), ('{"n": 5, "m": 1}', "^RuntimeError: five is out")],
)
def test_whatever_a_models_own_check_raises_is_the_outputs(text: str, words: str) -> None:
    form = validation.form(Picky)
    assert form is not None
    assert form.read('{"n": 1, "m": 5}') == {"n": 1, "m": 5}
    with pytest.raises(validation.Unfit, match=words):
        form.read(text)


def test_a_model_of_a_list_is_a_form_too() -> None:
    form = validation.form(RootModel[list[int]])
    assert form is not None
    assert form.read("[1, 2]") == [1, 2]


def test_a_schema_comes_from_a_file(tmp_path: Path) -> None:
    place = tmp_path / "schema.json"
    place.write_bytes(orjson.dumps(object_of(a={"type": "integer"})))
    form = validation.form(place)
    assert form is not None
    assert form.read('{"a": 1}') == {"a": 1}
    assert validation.form(None) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file.*module:PydanticModel"),
        (b"{", "not JSON"),
        (b"[1]", "no JSON object"),
        (b'{"a": "string"}', "no keyword"),
    ],
)
def test_a_file_that_is_no_schema_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    place = tmp_path / "schema.json"
    if content is not None:
        place.write_bytes(content)
    with pytest.raises(validation.SchemaWrong, match=rf"schema\.json cannot be used: .*{words}"):
        validation.form(str(place))


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory."""
    (tmp_path / "beside_data.py").write_text(
        "from pydantic import BaseModel\nclass M(BaseModel):\n    a: int\nX = 5\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "beside_data", raising=False)
    return "beside_data"


def test_a_model_is_found_in_a_module_beside_the_data(beside: str) -> None:
    before = list(sys.path)
    form = validation.form(f"{beside}:M")
    assert form is not None
    assert form.read('{"a": 1}') == {"a": 1}
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("beside_data:N", "AttributeError"),
        ("beside_data:X", "no pydantic model"),
        ("beside_none:M", "ModuleNotFoundError"),
        ("beside_data.py", "so beside_data:Model"),
        ("beside_data.py:M", "so beside_data:M"),
        (":M", "ValueError"),
    ],
)
def test_what_names_no_model_is_refused(beside: str, name: str, words: str) -> None:
    with pytest.raises(validation.SchemaWrong, match=f"{name} cannot be used: .*{words}"):
        validation.form(name)


@pytest.mark.parametrize(
    ("kind", "made"), [(int, "x"), (int, 1.5), (bool, 1), (float, "1"), (list[int], 2), (list[int], "12")]
)
def test_what_a_models_validators_make_that_no_column_holds_is_invalid(kind: Any, made: Any) -> None:
    given = {int: 1, bool: True, float: 1.0}.get(kind, [1])
    model = create_model("Made", a=(Annotated[kind, AfterValidator(lambda _: made)], ...))
    form = validation.form(model)
    assert form is not None
    with pytest.raises(validation.Unfit, match="a: the model's validators"):
        form.read(orjson.dumps({"a": given}).decode())
