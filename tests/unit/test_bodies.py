import inspect
from typing import Any

import orjson
import pytest

from jobs import bodies, errors

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def _chat(**body: Any) -> bodies.ChatBody:
    found = bodies.read(CHAT, {"model": "m", "messages": HELLO, **body})
    assert isinstance(found, bodies.ChatBody)
    return found


def _refused(endpoint: str = CHAT, **body: Any) -> errors.ParameterRefused:
    whole = {"model": "m", "messages": HELLO} if endpoint == CHAT else {"model": "m"}
    with pytest.raises(errors.ParameterRefused) as refused:
        bodies.read(endpoint, whole | body).params()
    assert refused.value.status == 400
    assert len(str(refused.value)) < 400
    orjson.dumps(refused.value.body())
    return refused.value


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", value) for value in (0, -1, 1.5, "16", True, [1], {})]
    + [("max_completion_tokens", 0), ("min_tokens", -1), ("ignore_eos", 1), ("ignore_eos", "true")]
    + [("temperature", value) for value in (-0.1, 2.1, "1", True, float("inf"), [])]
    + [("top_p", 0), ("top_p", 1.1), ("top_p", True), ("top_k", -2), ("top_k", 1.5), ("min_p", 2)]
    + [("seed", 1.5), ("seed", "1"), ("seed", 2**63), ("seed", True), ("user", 3)]
    + [("stop", value) for value in ("", ["a", ""], list("abcde"), 3, [1], {}, [None])]
    + [("n", 2), ("n", True), ("n", 0), ("logprobs", True), ("top_logprobs", 2), ("best_of", 2)]
    + [("presence_penalty", 0.1), ("frequency_penalty", -1), ("repetition_penalty", 1.1), ("echo", True)]
    + [("logit_bias", {"1": 5}), ("tools", [{"type": "function"}]), ("tool_choice", "required")]
    + [("response_format", {"type": "json_object"}), ("response_format", "text"), ("stream", 0)]
    + [("chat_template_kwargs", []), ("messages", []), ("messages", "hi"), ("messages", {})],
)
def test_a_parameter_that_is_not_honoured_is_refused_by_name(name: str, value: object) -> None:
    error = _refused(**{name: value})
    assert error.param == name
    assert name in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, fine in bodies.NEUTRAL.items() for value in fine]
    + [("n", 1.0), ("presence_penalty", 0.0), ("top_k", -1), ("user", "me"), ("stop", [])],
)
def test_a_value_that_changes_nothing_is_as_if_absent(name: str, value: object) -> None:
    assert _chat(**{name: value}).params() == _chat().params()


@pytest.mark.parametrize("name", [*bodies.ChatBody.model_fields, *bodies.NEUTRAL])
def test_null_is_as_if_absent(name: str) -> None:
    if name in ("model", "messages"):
        assert _refused(**{name: None}).code == "missing_required_parameter"
    else:
        assert _chat(**{name: None}).params() == _chat().params()


def test_an_unknown_parameter_is_refused_by_name() -> None:
    error = _refused(foo=1)
    assert (error.code, error.param) == ("unknown_parameter", "foo")
    assert _refused(**{"a.str.b": 1}).param == "a.str.b"
    assert len(_refused(**{"x" * 100_000: 1}).param or "") < 100


@pytest.mark.parametrize("stop", ["a", ["a"]])
def test_one_stop_string_is_a_list_of_one(stop: object) -> None:
    assert _chat(stop=stop).params()["stop"] == ["a"]


def test_each_parameter_that_changes_the_output_is_kept() -> None:
    given = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["b", "\n"],
        "min_tokens": 1,
        "ignore_eos": True,
    }
    assert _chat(**given).params() == given


def test_greedy_requests_that_differ_only_in_sampling_are_equal() -> None:
    assert _chat(temperature=0, seed=1, top_p=0.5).params() == _chat(temperature=0.0, top_k=9).params()
    assert _chat(temperature=1).params() == _chat(temperature=1.0).params() == _chat().params()


def test_max_completion_tokens_means_max_tokens() -> None:
    assert _chat(max_completion_tokens=3).params()["max_tokens"] == 3
    assert _chat(max_completion_tokens=3, max_tokens=3).params()["max_tokens"] == 3
    assert _refused(max_completion_tokens=3, max_tokens=4).param == "max_completion_tokens"


def test_extreme_numbers_stay_in_the_range_of_the_engine() -> None:
    params = _chat(temperature=5e-324, top_k=2**63 - 1, seed=-(2**63)).params()
    assert params["temperature"] == bodies.LEAST_TEMPERATURE
    assert params["top_k"] == bodies.MOST_TOP_K
    orjson.dumps(params)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_text_parts_are_one_text(role: str) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert _chat(messages=[{"role": role, "content": parts}]).messages[0].content == "hi"


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "x"}}],
        [{"type": "text"}],
        [{"type": "text", "text": 1}],
        ["hi"],
        3,
        {},
        None,
    ],
)
def test_content_that_is_no_text_is_refused(content: object) -> None:
    assert (_refused(messages=[*HELLO, {"role": "user", "content": content}]).param or "").startswith(
        "messages[1]"
    )


@pytest.mark.parametrize("role", ["robot", "", None, 3])
def test_an_unknown_role_is_refused(role: object) -> None:
    assert _refused(messages=[{"role": role, "content": "x"}]).param == "messages[0].role"


def test_content_is_null_only_beside_tool_calls() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None}
    plain = _chat(messages=[*HELLO, message]).messages[1].plain()
    assert plain == {"role": "assistant", "content": None, "tool_calls": calls}
    assert _refused(messages=[{"role": "assistant", "content": None, "tool_calls": None}]).param


def test_templates_see_a_developer_as_system() -> None:
    assert _chat(messages=[{"role": "developer", "content": "x"}]).messages[0].plain()["role"] == "system"


def test_template_options_cannot_set_what_is_not_the_templates() -> None:
    from transformers import PreTrainedTokenizerBase

    named = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name in named.keys() - {"self", "kwargs"} | {"messages"}:
        assert _refused(chat_template_kwargs={name: 1}).param == "chat_template_kwargs"
    assert _chat(chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [1, -1], [1, True], [[1]], 3, {}, [""]])
def test_a_prompt_is_one_text_or_token_ids(prompt: object) -> None:
    assert _refused(TEXT, prompt=prompt).param == "prompt"


def test_a_text_completion_has_sixteen_tokens_unless_told() -> None:
    for given in ({}, {"max_tokens": None}):
        assert bodies.read(TEXT, {"model": "m", "prompt": ["x"], **given}).params()["max_tokens"] == 16
    assert _refused(TEXT).param == "prompt"
    assert _refused(TEXT, prompt="x", messages=HELLO).code == "unknown_parameter"


def test_a_refusal_of_a_deep_value_does_not_end_the_stack() -> None:
    deep = orjson.loads(b"[" * 1000 + b"]" * 1000)
    for name in ("n", "max_tokens", "messages", "stop", "foo"):
        assert (_refused(**{name: deep}).param or "").startswith(name)
