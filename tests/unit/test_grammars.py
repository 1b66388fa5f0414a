"""What becomes a grammar, and what is refused before anything runs: with the parameter and the reason."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import errors, grammar_schemas, grammars

SCHEMAS = Path(__file__).parents[1] / "data" / "schemas"
REFUSED = json.loads((SCHEMAS / "refused.json").read_text())
ACCEPTED = json.loads((SCHEMAS / "accepted.json").read_text())
JSON = {"type": "json_object"}


def tool(name: str = "f", parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def build(
    response_format: Any = None,
    tools: Any = (),
    choice: Any = "auto",
    format: str | None = "hermes",
    reasoning: str | None = None,
    parallel: bool = True,
) -> str | None:
    return grammars.build(response_format, list(tools), choice, format, reasoning, parallel)


@pytest.mark.parametrize("reasoning", [None, "open", "closed"])
@pytest.mark.parametrize("response_format", [None, {"type": "text"}])
def test_text_without_calls_has_no_grammar(response_format: Any, reasoning: str | None) -> None:
    assert build(response_format, reasoning=reasoning) is None
    assert build(response_format, [tool()], "none", reasoning=reasoning) is None


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_schema_is_accepted(name: str) -> None:
    assert build(of_schema(ACCEPTED[name]), choice="none")


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_held_is_refused_with_the_reason(name: str) -> None:
    for _ in range(2):  # also when the answer is remembered
        with pytest.raises(errors.ParameterRefused) as raised:
            build(of_schema(REFUSED[name]["schema"]), choice="none")
        message = str(raised.value)
        assert REFUSED[name]["says"] in message
        assert "\n" not in message
        assert raised.value.param == "response_format"


@pytest.mark.parametrize("format", ["hermes", "llama"])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "bad"}}])
def test_the_tool_whose_parameters_are_refused_is_named(choice: Any, format: str) -> None:
    tools = [tool("good", ACCEPTED["weather_tool"]), tool("bad", {"type": "object", "not": {"type": "null"}})]
    with pytest.raises(errors.ParameterRefused, match="'not'") as raised:
        build(tools=tools, choice=choice, format=format)
    assert raised.value.param == "tools[1].function.parameters"


def test_what_the_library_refuses_names_its_tool_too() -> None:
    tools = [tool("good"), tool("bad", {"type": "object", "properties": {"a": {"type": "dict"}}})]
    with pytest.raises(errors.ParameterRefused, match="Invalid type: dict") as raised:
        build(JSON, tools)
    assert raised.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": ["null"]}, {"enum": ["a"]}, [], True])
def test_parameters_that_describe_no_object_are_refused(parameters: Any) -> None:
    with pytest.raises(errors.ParameterRefused) as raised:
        build(tools=[tool("f", parameters)])
    assert raised.value.param == "tools[0].function.parameters"


def test_only_the_named_function_counts() -> None:
    tools = [tool("bad", {"type": "dict"}), tool("good")]
    named = build(tools=tools, choice={"type": "function", "function": {"name": "good"}})
    assert named is not None
    assert '"const": "good"' in named
    assert '"bad"' not in named


def test_tools_without_a_format_for_calls_are_refused() -> None:
    with pytest.raises(errors.ParameterRefused, match="chat template") as raised:
        build(tools=[tool()], format=None)
    assert raised.value.param == "tools"


@pytest.mark.parametrize("reasoning", [None, "open", "closed"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "choice", ["none", "auto", "required", {"type": "function", "function": {"name": "g"}}]
)
@pytest.mark.parametrize("response_format", [None, JSON, of_schema(ACCEPTED["recursive_tree"])])
@pytest.mark.parametrize("format", ["hermes", "llama"])
def test_every_combination_compiles(
    format: str, response_format: Any, choice: Any, parallel: bool, reasoning: str | None
) -> None:
    tools = [tool(), tool("g", ACCEPTED["recursive_root"])]
    text = build(response_format, tools, choice, format, reasoning, parallel)
    assert (text is None) == (choice == "none" and response_format is None)


def test_a_schema_without_strict_is_held_all_the_same() -> None:
    schema = ACCEPTED["flat_object"]
    strict, loose = of_schema(schema), of_schema(schema)
    strict["json_schema"]["strict"], loose["json_schema"]["strict"] = True, False
    assert build(strict) == build(loose) == build(of_schema(schema))


def test_the_order_of_properties_is_the_schemas() -> None:
    text = build(of_schema({"type": "object", "properties": {"z": {}, "a": {}}}))
    assert text is not None
    assert text.index('"z"') < text.index('"a"')


@pytest.mark.parametrize("format", sorted(grammar_schemas.FORMATS))
def test_a_format_that_is_enforced_compiles(format: str) -> None:
    assert f'"{format}"' in str(build(of_schema({"type": "string", "format": format})))


def test_options_of_the_library_are_not_the_users_to_set() -> None:
    loose = {"x-guidance": {"lenient": True}, "type": "string", "format": "unheard-of"}
    text = build(of_schema(loose))
    assert text is not None
    assert "lenient" not in text
    with pytest.raises(errors.ParameterRefused):
        build(of_schema(loose | {"not": {"const": "a"}}))


def test_references_point_into_the_schema_they_are_part_of() -> None:
    schema = {
        "$defs": {"n": {"type": "integer"}},
        "properties": {
            "a": {"$ref": "#/$defs/n"},
            "b": {"$ref": "#"},
            "$ref": {"const": {"$ref": "#/not/one"}},
            "own": {"$id": "https://example.com/own", "$defs": {"m": {}}, "$ref": "#/$defs/m"},
            "far": {"$ref": "other#/x"},
        },
    }
    fitted = grammar_schemas.fit(schema, "/properties/arguments")["properties"]
    assert fitted["a"] == {"$ref": "#/properties/arguments/$defs/n"}
    assert fitted["b"] == {"$ref": "#/properties/arguments"}
    assert fitted["$ref"] == {"const": {"$ref": "#/not/one"}}
    assert fitted["own"]["$ref"] == "#/$defs/m"
    assert fitted["far"] == {"$ref": "other#/x"}


LARGE = {
    "properties": {"type": "object", "properties": {f"p{i}": {} for i in range(1_001)}},
    "patterns": {"type": "object", "patternProperties": {f"^p{i}_": {} for i in range(51)}},
    "subschemas": {"anyOf": [{"type": "object", "properties": {"a": {"const": i}}} for i in range(6_000)]},
    "bytes": {"enum": ["x" * 1000] * 600},
    "an intersection": {
        "allOf": [
            {"anyOf": [{"type": "object", "required": [f"a{i}{j}"]} for j in range(9)]} for i in range(9)
        ]
    },
    "multiples": {"type": "integer", "multipleOf": 1_000_003},
}


@pytest.mark.parametrize("name", LARGE)
def test_a_schema_that_is_too_large_costs_little_time(name: str) -> None:
    started = time.perf_counter()
    with pytest.raises(errors.ParameterRefused) as raised:
        build(of_schema(LARGE[name]))
    assert time.perf_counter() - started < 10
    assert len(str(raised.value)) < 600


def test_the_same_schema_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {"only": {"const": "here"}}}
    first = build(of_schema(schema))
    monkeypatch.setattr(grammars, "_reason", lambda text: pytest.fail("compiled again"))
    assert build(of_schema(schema)) == first
