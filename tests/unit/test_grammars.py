"""What becomes a grammar, and what is refused before anything runs: with the parameter and the reason."""

import json
import time
from pathlib import Path
from typing import Any

import llguidance
import pytest

from jobs import errors, grammars
from jobs.grammars import compiler as grammar_compiler
from jobs.grammars import rules as grammar_rules
from jobs.grammars import schemas as grammar_schemas

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


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf", "prefixItems", "items", "properties"])
def test_a_keyword_with_a_number_where_schemas_belong_is_refused(keyword: str) -> None:
    with pytest.raises(errors.ParameterRefused):
        build(of_schema({"type": "object", keyword: -5}), choice="none")


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_held_is_refused_with_the_reason(name: str) -> None:
    for _ in range(2):  # also when the answer is remembered
        with pytest.raises(errors.ParameterRefused) as raised:
            build(of_schema(REFUSED[name]["schema"]), choice="none")
        message = str(raised.value)
        assert REFUSED[name]["says"] in message
        assert "\n" not in message
        assert raised.value.param == "response_format"


@pytest.mark.parametrize("reasoning", [None, "open", "closed"])
def test_a_reason_shows_nothing_of_the_grammar(reasoning: str | None) -> None:
    with pytest.raises(errors.ParameterRefused) as raised:
        build(of_schema({"properties": {"a": {"type": "dict"}}}), choice="none", reasoning=reasoning)
    assert str(raised.value) == "The schema cannot be used: Invalid type: dict (at #/properties/a)."


def test_a_reason_of_the_library_gets_its_place_in_the_schema_of_the_user() -> None:
    inner = {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?=a)"}]}}
    schema = {"type": "object", "properties": {"a": inner, "b": {"type": "integer"}}}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for wanted in ({"response_format": of_schema(schema), "choice": "none"}, {"tools": [function]}):
        with pytest.raises(
            errors.ParameterRefused, match=r"look-around.* \(at #/properties/a/items/anyOf/1\)"
        ):
            build(**wanted)
    referring = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": inner}}
    with pytest.raises(errors.ParameterRefused, match=r"not supported \(at #/\$defs/b\)"):
        build(of_schema(referring), choice="none")


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
            "far": {"$ref": "other#/items"},
        },
    }
    fitted = grammar_schemas.fit(schema, "/properties/arguments")["properties"]
    assert fitted["a"] == {"$ref": "#/properties/arguments/$defs/n"}
    assert fitted["b"] == {"$ref": "#/properties/arguments"}
    assert fitted["$ref"] == {"const": {"$ref": "#/not/one"}}
    assert fitted["own"]["$ref"] == "#/$defs/m"
    assert fitted["far"] == {"$ref": "other#/items"}


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
    "no multiple": {"type": "integer", "multipleOf": "x" * 3000},
    "required": {"type": "object", "required": [f"p{i}" for i in range(30_000)]},
    # More than a stack holds.
    "a chain of references": {
        "$ref": "#/$defs/0",
        "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(9_000)} | {"9000": {}},
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_a_schema_that_is_too_large_costs_little_time(name: str) -> None:
    started = time.perf_counter()
    with pytest.raises(errors.ParameterRefused) as raised:
        build(of_schema(LARGE[name]))
    assert time.perf_counter() - started < 10
    assert len(str(raised.value)) < 600


@pytest.mark.long
def test_a_schema_that_would_take_hours_is_refused_in_seconds() -> None:
    patterns = [{"type": "string", "pattern": f"a{{1,{i}}}b.*c"} for i in range(50, 80)]
    parameters = {"type": "object", "properties": {"a": {"allOf": patterns}}}
    with pytest.raises(errors.ParameterRefused, match="more than 5 s to compile") as raised:
        build(tools=[tool("good"), tool("bad", parameters)])
    assert raised.value.param == "tools"


def test_a_schema_that_ends_the_compiler_does_not_harm_the_next() -> None:
    with pytest.raises(errors.ParameterRefused, match="too large") as raised:
        build(tools=[tool("good"), tool("bad", {"type": "object"} | LARGE["a chain of references"])])
    assert raised.value.param == "tools[1].function.parameters"
    assert build(of_schema({"const": "next"}))


def test_the_compiler_may_end_by_itself() -> None:
    compiler = grammar_compiler.Compiler()
    compiler.close()
    grammar = grammar_rules.grammar({"start": grammar_rules.document({"type": "string"})})
    assert compiler.reason(grammar) is None
    assert compiler._process is not None
    compiler._process.kill()
    assert compiler.reason(grammar) is None
    assert compiler.reason("start: (") is not None
    compiler.close()


def test_a_long_schema_is_not_remembered() -> None:
    before = grammars._built.cache_info().currsize
    with pytest.raises(errors.ParameterRefused):
        build(of_schema({"type": "object", "description": "x" * grammars.MOST_BYTES, "not": {"const": 1}}))
    assert grammars._built.cache_info().currsize == before


INEXACT = [2**53 + 1, 2**63, -(2**63), 12345678901234567890, 123456789.12345679, 1.5e300, 5e-324]
EXACT = [0, -0.0, 0.1, -1e-5, 3.0, 2**53, -(2**53), 2**60, 2**63 - 1, 1e21, 123456.789, True, None]


@pytest.mark.parametrize("number", INEXACT)
@pytest.mark.parametrize("keyword", ["const", "enum", "minimum", "exclusiveMaximum"])
def test_a_number_that_a_grammar_would_round_is_refused(keyword: str, number: float) -> None:
    value = {"const": {"a": [number]}, "enum": ["x", number]}.get(keyword, number)
    with pytest.raises(errors.ParameterRefused, match=rf"{keyword}.* digits .*#/properties/n\)"):
        build(of_schema({"type": "object", "properties": {"n": {keyword: value}}}))


@pytest.mark.parametrize("number", EXACT)
def test_what_is_written_for_a_number_is_that_number(number: Any) -> None:
    assert build(of_schema({"const": number}))
    assert (
        json.loads(_first(grammar_rules.grammar({"start": grammar_rules.document({"const": number})})))
        == number
    )


def _first(grammar: str) -> str:
    """Return the first text that is complete under a grammar, its lowest bytes first."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    text = b""
    while not matcher.is_accepting():
        mask = matcher.compute_bitmask()
        text += bytes([next(b for b in range(256) if b not in b" \t\r\n" and mask[b // 8] >> b % 8 & 1)])
        matcher.consume_token(text[-1])
    return text.decode()


@pytest.mark.parametrize(
    "reference",
    [
        "#/x/a",
        "#/properties/a/const",
        "#/properties/a/enum/0",
        "#/%63onst",
        "#/properties",
        "#/$defs",
        "y#/x/a",
    ],
)
def test_a_reference_leads_to_a_schema_and_not_to_what_nobody_looked_at(reference: str) -> None:
    hidden = {"type": "object", "x-guidance": {"lenient": True}}
    schema = {"x": {"a": hidden}, "properties": {"a": {"const": hidden, "enum": [hidden]}}, "const": hidden}
    with pytest.raises(errors.ParameterRefused, match="must lead to a schema"):
        build(of_schema({"$id": "https://example.com/y", **schema, "$ref": reference}))


@pytest.mark.parametrize(
    "reference",
    [
        "#",
        "#/$defs/a~1b",
        "#/$defs/a%20b",
        "#/items/0",
        "#/items/0/items",
        "#/anyOf/1/properties/const",
        "#named",
    ],
)
def test_any_schema_of_a_schema_can_be_led_to(reference: str) -> None:
    assert grammar_schemas.fit({"$ref": reference}) == {"$ref": reference}


def test_the_same_schema_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "object", "properties": {"only": {"const": "here"}}}
    first = build(of_schema(schema))
    monkeypatch.setattr(grammar_compiler, "reason", lambda text: pytest.fail("compiled again"))
    assert build(of_schema(schema)) == first
