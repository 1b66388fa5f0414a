import inspect
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import bodies, errors
from jobs.bodies import chat as body_chat
from jobs.bodies import completion as body_completion
from jobs.bodies import generation as body_generation
from jobs.bodies import message as body_message

CHAT, TEXT, EMBED = bodies.BODIES
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHOICE = {"type": "function", "function": {"name": "f"}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def _calling(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def _chat(**body: Any) -> body_chat.ChatBody:
    found = bodies.read(CHAT, {"model": "m", "messages": HELLO, **body})
    assert isinstance(found, body_chat.ChatBody)
    return found


def _text(**body: Any) -> body_completion.CompletionBody:
    found = bodies.read(TEXT, {"model": "m", "prompt": "x", **body})
    assert isinstance(found, body_completion.CompletionBody)
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
    + [("n", value) for value in (True, 0, 129, 1.0, "2")]
    + [("presence_penalty", value) for value in (2.1, -2.1, "0", True, float("inf"))]
    + [("frequency_penalty", value) for value in (2.1, -2.1, "0", True)]
    + [("repetition_penalty", value) for value in (0, -1, 0.001, 10.1, "1", True)]
    + [("logprobs", 1), ("logprobs", "true"), ("top_logprobs", 21), ("top_logprobs", -1)]
    + [("top_logprobs", True), ("top_logprobs", 2), ("stream", 0), ("stream", "no")]
    + [("response_format", value) for value in ("text", {}, {"type": "xml"}, [], 3)]
    + [("tools", "f"), ("tools", {}), ("tools", [TOOL] * 129), ("parallel_tool_calls", 1)]
    + [("tool_choice", value) for value in ("any", 1, {}, {"type": "function"}, {"type": "allowed_tools"})]
    + [("tool_choice", "required"), ("tool_choice", CHOICE)]
    + [("reasoning_effort", "much"), ("reasoning_effort", 1)]
    + [("continue_final_message", True), ("continue_final_message", 1), ("add_generation_prompt", "no")]
    + [("truncate_prompt_tokens", value) for value in (0, -2, 1.5, "3", True)]
    + [("chat_template_kwargs", []), ("messages", []), ("messages", "hi"), ("messages", {})]
    + [("metadata", "x"), ("metadata", []), ("store", True), ("service_tier", "flex")]
    + [("modalities", ["text", "audio"]), ("modalities", "text"), ("modalities", [])]
    + [("safety_identifier", 1), ("prompt_cache_key", 1)],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    error = _refused(**{name: value})
    assert error.param == name
    assert name in str(error)


NEUTRAL = [
    *[("n", 1), ("presence_penalty", 0), ("frequency_penalty", 0.0), ("repetition_penalty", 1)],
    *[("logit_bias", {}), ("logit_bias", {"5": 0}), ("logprobs", False), ("top_logprobs", 0), ("top_k", -1)],
    *[("response_format", {"type": "text"}), ("tools", []), ("tool_choice", "none"), ("tool_choice", "auto")],
    *[("stop", []), ("stream", False), ("parallel_tool_calls", False), ("continue_final_message", False)],
    ("add_generation_prompt", True),
]
WITHOUT_EFFECT = [
    *[("user", "me"), ("metadata", {"a": "b"}), ("store", False), ("service_tier", "auto")],
    *[("service_tier", "default"), ("safety_identifier", "x"), ("prompt_cache_key", "x")],
    ("modalities", ["text"]),
]


@pytest.mark.parametrize(("name", "value"), NEUTRAL + WITHOUT_EFFECT)
def test_a_value_that_changes_nothing_is_as_if_absent(name: str, value: object) -> None:
    assert _chat(**{name: value}).params() == _chat().params()


@pytest.mark.parametrize("name", [*body_chat.ChatBody.model_fields, *bodies.REFUSED])
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


@pytest.mark.parametrize("endpoint", bodies.BODIES)
@pytest.mark.parametrize("name", bodies.REFUSED)
def test_what_other_servers_have_is_refused_with_what_to_do_instead(endpoint: str, name: str) -> None:
    error = _refused(endpoint, **{name: "x"})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert bodies.REFUSED[name] in str(error)


@pytest.mark.parametrize("name", ["lora_request", "lora", "lora_path", "adapter", "adapters"])
def test_a_lora_adapter_is_refused_as_not_supported(name: str) -> None:
    assert "is not supported: Longhaul runs whole models, no LoRA adapters" in str(
        _refused(**{name: {"name": "x"}})
    )


@pytest.mark.parametrize(
    ("endpoint", "name", "home"),
    [
        *[(CHAT, "prompt", TEXT), (CHAT, "echo", TEXT), (CHAT, "best_of", TEXT), (CHAT, "input", EMBED)],
        *[(TEXT, "messages", CHAT), (TEXT, "tools", CHAT), (TEXT, "response_format", CHAT)],
        *[(TEXT, "max_completion_tokens", CHAT), (TEXT, "dimensions", EMBED), (EMBED, "prompt", TEXT)],
        *[(EMBED, "temperature", f"{CHAT} and {TEXT}"), (EMBED, "messages", CHAT)],
    ],
)
def test_a_parameter_of_another_endpoint_is_refused_with_its_endpoint(
    endpoint: str, name: str, home: str
) -> None:
    error = _refused(endpoint, **{name: 1})
    assert (error.param, error.code) == (name, "unknown_parameter")
    assert f"is a parameter of {home}, not of {endpoint}" in str(error)


@pytest.mark.parametrize("stop", ["a", ["a"]])
def test_one_stop_string_is_a_list_of_one(stop: object) -> None:
    assert _chat(stop=stop).params()["stop"] == ["a"]


def test_each_parameter_that_changes_the_output_is_kept() -> None:
    given: dict[str, Any] = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["b", "\n"],
        "min_tokens": 1,
        "ignore_eos": True,
        "n": 3,
        "presence_penalty": -0.5,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.1,
    }
    assert _chat(**given).params() == given
    assert _text(**given).params() == given


def test_greedy_requests_that_differ_only_in_sampling_are_equal() -> None:
    assert _chat(temperature=0, seed=1, top_p=0.5).params() == _chat(temperature=0.0, top_k=9).params()
    assert _chat(temperature=1).params() == _chat(temperature=1.0).params() == _chat().params()


def test_max_completion_tokens_means_max_tokens() -> None:
    assert _chat(max_completion_tokens=3).params()["max_tokens"] == 3
    assert _chat(max_completion_tokens=3, max_tokens=3).params()["max_tokens"] == 3
    assert _refused(max_completion_tokens=3, max_tokens=4).param == "max_completion_tokens"


def test_extreme_numbers_stay_in_the_range_of_the_engine() -> None:
    params = _chat(temperature=5e-324, top_k=2**63 - 1, seed=-(2**63)).params()
    assert params["temperature"] == body_generation.LEAST_TEMPERATURE
    assert params["top_k"] == body_generation.MOST_TOP_K
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
    # Empty text: many templates add it to strings.
    assert plain == {"role": "assistant", "content": "", "tool_calls": calls}
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
    for told in ({}, {"max_tokens": None}):
        assert bodies.read(TEXT, {"model": "m", "prompt": ["x"], **told}).params()["max_tokens"] == 16
    assert _refused(TEXT).param == "prompt"
    assert _refused(TEXT, prompt="x", messages=HELLO).code == "unknown_parameter"


def test_biases_are_sorted_by_token_id_and_those_of_zero_left_out() -> None:
    given = {"30": 100, "7": -100.0, "8": 0, "200": 0.5}
    assert _chat(logit_bias=given).params()["logit_bias"] == [[7, -100.0], [30, 100.0], [200, 0.5]]
    assert _chat(logit_bias={7: 1}).params()["logit_bias"] == [[7, 1.0]]
    most = {str(n): 1 for n in range(1024)}
    assert len(_chat(logit_bias=most).params()["logit_bias"]) == 1024
    assert _refused(logit_bias=most | {"2000": 1}).param == "logit_bias"


@pytest.mark.parametrize(
    ("value", "param"),
    [([], "logit_bias"), ("x", "logit_bias"), ({"x": 1}, "logit_bias"), ({"-1": 1}, "logit_bias")]
    + [({name: 1}, "logit_bias") for name in ("07", " 7", "+7", "7.0", "1e3", "", "\u0667", "9" * 5000)]
    + [({"7": bias}, "logit_bias.7") for bias in (101, -101, "1", True, None, [], float("nan"))],
)
def test_a_bias_that_is_none_is_refused(value: object, param: str) -> None:
    assert _refused(logit_bias=value).param == param


def test_log_probabilities_of_a_chat_are_asked_for_in_two_parameters() -> None:
    assert "logprobs" not in _chat().params()
    assert _chat(logprobs=True).params()["logprobs"] == 0
    assert _chat(logprobs=True, top_logprobs=20).params()["logprobs"] == 20
    assert "logprobs: true" in str(_refused(top_logprobs=1, logprobs=False))


def test_log_probabilities_of_a_completion_are_a_number() -> None:
    assert "logprobs" not in _text().params()
    assert [_text(logprobs=n).params()["logprobs"] for n in (0, 20)] == [0, 20]
    for value in (21, -1, True, "1"):
        assert _refused(TEXT, prompt="x", logprobs=value).param == "logprobs"


def test_an_echo_with_log_probabilities_has_those_of_the_prompt() -> None:
    assert _text(echo=False).params() == _text().params()
    assert _text(echo=True).params() == _text().params() | {"answer": {"echo": True}}
    params = _text(echo=True, logprobs=0).params()
    assert (params["answer"], params["prompt_logprobs"], params["logprobs"]) == ({"echo": True}, True, 0)
    assert _refused(TEXT, prompt="x", echo=1).param == "echo"


def test_best_of_may_only_equal_n() -> None:
    assert _text(best_of=1).params() == _text().params()
    assert _text(best_of=3, n=3).params() == _text(n=3).params()
    assert _refused(TEXT, prompt="x", best_of=3).param == "best_of"
    assert _refused(TEXT, prompt="x", best_of=1, n=3).param == "best_of"


def test_a_suffix_is_refused_with_a_reason_of_its_own() -> None:
    assert "fill in between" in str(_refused(TEXT, prompt="x", suffix="y"))


@pytest.mark.parametrize(
    ("content", "at", "word"),
    [
        ([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}], 1, "image_url"),
        ([{"type": "input_audio", "input_audio": {}}], 0, "input_audio"),
        ([{"type": "text", "text": "x"}, {"type": "file", "file": {}}], 1, "file"),
        ([{"type": "text", "text": "x", "cache_control": {}}], 0, "only parts"),
        (["x"], 0, "a part"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_type_and_place(content: Any, at: int, word: str) -> None:
    error = _refused(messages=[*HELLO, {"role": "user", "content": content}])
    assert error.param == f"messages[1].content[{at}]"
    assert word in str(error)


@pytest.mark.parametrize(
    ("message", "at"),
    [
        ({"role": "user", "content": "x", "tool_calls": CALLS}, "tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 1}, "tool_call_id"),
        ({"role": "assistant", "content": "x", "tool_calls": {}}, "tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": ["f"]}, "tool_calls[0]"),
        (_calling(arguments="{}"), "tool_calls[0].function.name"),
        (_calling(name="f g", arguments="{}"), "tool_calls[0].function.name"),
        (_calling(name="f"), "tool_calls[0].function.arguments"),
        (_calling(name="f", arguments=3), "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [CALLS[0] | {"type": "custom"}]}, "tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [CALLS[0] | {"id": 1}]}, "tool_calls[0].id"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "refusal"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "user", "content": "x", "name": 3}, "name"),
    ],
)
def test_a_message_whose_fields_do_not_fit_is_refused_by_its_place(message: Any, at: str) -> None:
    assert _refused(messages=[*HELLO, message]).param == f"messages[1].{at}"


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None}
    plain = _chat(messages=[*HELLO, answer | {"tool_calls": [], "function_call": None}]).messages[1].plain()
    assert {"role": "assistant", "content": "x"}.items() <= plain.items()
    assert plain.keys() - {"role", "content"} <= body_message.OF_ANSWERS


def test_max_tokens_are_those_of_either_name() -> None:
    assert _chat(max_completion_tokens=3, max_tokens=None).params()["max_tokens"] == 3


@pytest.mark.parametrize(
    "body",
    [
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True, "messages": HELLO},
        {"continue_final_message": True, "response_format": {"type": "json_object"}},
        {"continue_final_message": True, "tools": [TOOL]},
    ],
)
def test_a_message_is_continued_only_where_that_can_be(body: dict[str, Any]) -> None:
    said = [*HELLO, {"role": "assistant", "content": "Once"}]
    param = "add_generation_prompt" if "add_generation_prompt" in body else "continue_final_message"
    assert _refused(**{"messages": said} | body).param == param
    assert _chat(messages=said, continue_final_message=True, add_generation_prompt=False)
    called = {"role": "assistant", "content": "x", "tool_calls": CALLS}
    assert _refused(messages=[*HELLO, called], continue_final_message=True).param
    blank = {"role": "assistant", "content": " \n"}
    assert _refused(messages=[*HELLO, blank], continue_final_message=True).param == "continue_final_message"


@pytest.mark.parametrize("form", [{"response_format": {"type": "json_object"}}, {"tools": [TOOL]}])
def test_what_would_break_the_form_of_an_answer_is_refused_beside_it(form: dict[str, Any]) -> None:
    assert _refused(min_tokens=1, **form).param == "min_tokens"
    assert _refused(ignore_eos=True, **form).param == "ignore_eos"
    assert _chat(min_tokens=1, tools=[TOOL], tool_choice="none")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "a", "16", "\0", "auto", "required", "function", "json_schema", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "json_schema", "schema", "role", "content", "5"]),
            inner,
        )
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("endpoint", bodies.BODIES)
@settings(max_examples=60)
@given(st.data())
def test_whatever_a_body_holds_it_is_read_or_refused_by_name(endpoint: str, data: st.DataObject) -> None:
    names = st.sampled_from([*bodies.BODIES[endpoint].model_fields, "foo"])
    body = data.draw(st.dictionaries(names, VALUES, max_size=4))
    good = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "x"}, EMBED: {"input": "x"}}[endpoint]
    try:
        orjson.dumps(bodies.read(endpoint, {"model": "m", **good} | body | {"model": "m"}).params())
    except errors.ParameterRefused as refused:
        error = orjson.loads(orjson.dumps(refused.body()))["error"]
    else:
        return
    assert error["param"]
    assert error["message"]


def test_a_refusal_of_a_deep_value_does_not_end_the_stack() -> None:
    deep = orjson.loads(b"[" * 1000 + b"]" * 1000)
    for name in ("n", "max_tokens", "messages", "stop", "foo"):
        assert (_refused(**{name: deep}).param or "").startswith(name)


MANY = 200_000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [1] * MANY}, "messages[0]"),
        ({"messages": [{}] * MANY}, "messages[0].role"),
        ({str(number): 1 for number in range(MANY)}, "0"),
        ({"metadata": {str(number): 1 for number in range(MANY)}}, "metadata.0"),
    ],
    ids=["numbers", "empty messages", "unknown names", "metadata"],
)
def test_of_very_many_errors_only_the_first_is_made(body: dict[str, Any], param: str) -> None:
    tracemalloc.start()
    error = _refused(**body)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.param == param
    assert most < 400 * MANY


def test_the_whole_is_not_shown_for_a_place_inside() -> None:
    error = _refused(EMBED, input=["a", 1])
    assert (error.param, str(error)) == ("input[1]", "input[1]: it must be a string.")
