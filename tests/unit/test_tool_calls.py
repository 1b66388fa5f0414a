import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.answers import tool_calls
from jobs.answers.tool_calls import Call

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=3)
CALLS = st.lists(st.tuples(st.text(min_size=1), ARGUMENTS), min_size=1, max_size=3)
PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "\n", ";", " ", "{", "}", "[", '"', ":", ",", "\\"),
    *('"name"', '"arguments"', '"parameters"', '{"name": "f", "arguments": {}}', "null", "NaN", "1e9"),
    *('"\\ud800"', "é", "[[[["),
]
TEXTS = st.text() | st.lists(st.sampled_from(PIECES)).map("".join)


def _written(name: str, arguments: dict[str, Any], key: str = "arguments", **style: Any) -> str:
    return json.dumps({"name": name, key: arguments}, **style)


def _read(calls: list[Call]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@given(CALLS, st.lists(st.text(alphabet="ab \n<>{}"), min_size=4, max_size=4), st.booleans(), st.booleans())
def test_hermes_calls_come_back_with_the_text_around_them(
    calls: list[tuple[str, dict[str, Any]]], texts: list[str], ascii: bool, lines: bool
) -> None:
    space = "\n" if lines else ""
    text = texts[0]
    for (name, arguments), after in zip(calls, texts[1:], strict=False):
        written = _written(name, arguments, ensure_ascii=ascii, indent=1 if lines else None)
        text += f"<tool_call>{space}{written}{space}</tool_call>{after}"
    content, found = tool_calls.parse("hermes", text)
    assert _read(found) == calls
    assert content == "".join(texts[: len(calls) + 1])


@given(CALLS, st.sampled_from(["parameters", "arguments"]), st.sampled_from([";", "\n", "; ", "\n\n"]))
def test_llama_calls_come_back(calls: list[tuple[str, dict[str, Any]]], key: str, between: str) -> None:
    for begin in ("", "<|python_tag|>", "\n\n", " <|python_tag|> "):
        text = begin + between.join(_written(name, arguments, key) for name, arguments in calls)
        content, found = tool_calls.parse("llama", text)
        assert (_read(found), content) == (calls, "")


@pytest.mark.parametrize("format", tool_calls.FORMATS)
@given(TEXTS)
def test_no_text_is_too_broken_and_none_of_it_is_lost(format: str, text: str) -> None:
    content, calls = tool_calls.parse(format, text)
    if not calls:
        assert content == text
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)
        (call.name + call.arguments).encode()
    if format == "hermes":
        assert content.count("<tool_call>") + len(calls) <= text.count("<tool_call>")
        removed = len(text) - len(content)
        assert removed >= sum(len(call.arguments) for call in calls if call.arguments != "{}")


def test_arguments_stay_in_the_words_of_the_model() -> None:
    written = '{ "b":1.50,"a" : "\\u00e9", "n": 100000000000000000000, "b": 2 }'
    for format, text in (
        ("hermes", f'<tool_call>{{"arguments": {written}, "name": "f"}}</tool_call>'),
        ("llama", f'{{"type": "function", "name": "f", "parameters": {written} }}'),
    ):
        assert tool_calls.parse(format, text) == ("", [Call("f", written)])


def test_arguments_may_come_as_a_string_of_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert tool_calls.parse("hermes", text) == ("", [Call("f", '{"a": 1}')])


def test_an_argument_may_hold_the_marks_of_a_call() -> None:
    arguments = '{"text": "</tool_call> <tool_call>{}; {"}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert tool_calls.parse("hermes", text) == ("", [Call("f", arguments)])


def test_a_call_without_arguments_has_none() -> None:
    for given_ in ("", ', "arguments": null', ', "arguments": {}'):
        text = f'<tool_call>{{"name": "now"{given_}}}</tool_call>'
        assert tool_calls.parse("hermes", text) == ("", [Call("now", "{}")])


@pytest.mark.parametrize(
    "broken",
    [
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "new\nline"}}</tool_call>',
        '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
        "<tool_call>" + '{"name": "f", "arguments": {"a": ' + "[" * 100_000,
    ],
)
def test_what_is_not_a_whole_call_stays_in_the_text(broken: str) -> None:
    assert tool_calls.parse("hermes", broken) == (broken, [])
    whole = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert tool_calls.parse("hermes", f"{broken}\n{whole}") == (f"{broken}\n", [Call("g", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello.",
        "<|python_tag|>print(1)",
        '{"name": "Ada", "age": 36}',
        '{"name": "f", "parameters": {}} is a call.',
        'I call {"name": "f", "parameters": {}}',
        '{"name": "f", "parameters": {}}; {"name": "g"',
        '[{"name": "f", "parameters": {}}]',
    ],
)
def test_text_that_is_not_calls_alone_is_llama_content(text: str) -> None:
    assert tool_calls.parse("llama", text) == (text, [])
