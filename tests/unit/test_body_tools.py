from typing import Any

import pytest

from jobs import bodies, errors
from jobs.bodies import chat as body_chat

CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {"name": "x", "schema": {}}


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def _read(**body: Any) -> body_chat.ChatBody:
    found = bodies.read(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}], **body})
    assert isinstance(found, body_chat.ChatBody)
    return found


def _param(**body: Any) -> str | None:
    with pytest.raises(errors.ParameterRefused) as refused:
        _read(**body)
    return refused.value.param


@pytest.mark.parametrize(
    ("tool", "at"),
    [
        (3, ""),
        ({}, ""),
        ({"type": "custom", "custom": {}}, ""),
        ({"type": "function"}, ".function"),
        (_tool() | {"strict": True}, ".strict"),
        *[(_tool(name=name), ".function.name") for name in (None, 3, "", "a b", "f" * 65, "é", "f\n")],
        (_tool(description=3), ".function.description"),
        *[(_tool(parameters=value), ".function.parameters") for value in (3, [], {"type": "string"}, True)],
        *[(_tool(strict=value), ".function.strict") for value in (1, "true")],
        (_tool(returns={}), ".function.returns"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(tool: object, at: str) -> None:
    assert _param(tools=[_tool(name="first"), tool]) == f"tools[1]{at}"


def test_two_tools_of_one_name_are_refused() -> None:
    assert _param(tools=[_tool(), _tool(name="g"), _tool()]) == "tools[2].function.name"


@pytest.mark.parametrize("name", ["get_weather", "a.b-c_D9", "f" * 64])
def test_tools_are_kept_in_order_and_without_nulls(name: str) -> None:
    parameters = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"default": None}}}
    given = [_tool(name=name, description=None, parameters=parameters, strict=True), _tool(name="g")]
    kept = _read(tools=given).tools
    assert kept == [_tool(name=name, parameters=parameters, strict=True), _tool(name="g")]
    assert list(kept[0]["function"]["parameters"]["properties"]) == ["b", "a"]


def test_equal_tools_are_checked_once() -> None:
    assert _read(tools=[_tool()]).tools is _read(tools=[_tool()]).tools
    assert _param(tools=[_tool(name="")]) == _param(tools=[_tool(name="")])


def test_a_choice_of_tools_needs_them() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        assert _param(tool_choice=choice) == "tool_choice"
        assert _param(tool_choice=choice, tools=[]) == "tool_choice"
        assert _read(tool_choice=choice, tools=[_tool()]).tool_choice == choice
    assert _param(tool_choice=named, tools=[_tool(name="g")]) == "tool_choice"


def test_tools_that_must_not_be_called_are_not_offered() -> None:
    body = _read(tools=[_tool()], tool_choice="none")
    assert (body.offered, body.constrained) == ([], False)
    assert _read(tools=[_tool()]).offered


@pytest.mark.parametrize(
    ("given", "at"),
    [
        ({"type": "json_schema"}, ".json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, ".json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, ".json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": True}}, ".json_schema.schema"),
        ({"type": "json_schema", "json_schema": SCHEMA | {"strict": 1}}, ".json_schema.strict"),
        ({"type": "json_schema", "json_schema": SCHEMA | {"foo": 1}}, ".json_schema.foo"),
        ({"type": "json_object", "json_schema": {}}, ".json_schema"),
    ],
)
def test_a_wrong_form_is_refused_by_its_place(given: dict[str, Any], at: str) -> None:
    assert _param(response_format=given) == f"response_format{at}"


def test_a_form_is_none_json_or_a_schema() -> None:
    named = {"name": "x", "schema": {"type": "object"}, "strict": True}
    assert _read(response_format={"type": "text"}).response_format is None
    assert _read(response_format={"type": "json_object", "json_schema": None}).response_format == {
        "type": "json_object"
    }
    found = _read(response_format={"type": "json_schema", "json_schema": named | {"description": None}})
    assert found.response_format == {"type": "json_schema", "json_schema": named}
    assert found.constrained
