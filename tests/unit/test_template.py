"""Chat templates in the formats of real models: tests/data/templates."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import errors, template, tokens
from jobs.model_settings import ModelSettings

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Bern?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def _load(source: Path, **settings: Any) -> template.ChatTemplate:
    model = ModelSettings(source=str(source), context_tokens=100, **settings)
    return tokens.Tokenizer.load("m", model).template


def _call(arguments: Any, content: str = "") -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


class Plain:
    """A tokenizer of which only the template is used."""

    def __init__(self, text: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self.chat_template = text
        self.special_tokens_map: dict[str, str] = {}
        self.apply_chat_template = PreTrainedTokenizerFast.apply_chat_template.__get__(self)
        self.get_chat_template = PreTrainedTokenizerFast.get_chat_template.__get__(self)


@pytest.fixture(scope="module")
def qwen(tokenizer_dir: Path) -> template.ChatTemplate:
    return _load(tokenizer_dir, chat_template=str(TEMPLATES / "qwen3.jinja"))


@pytest.fixture(scope="module")
def llama(tokenizer_dir: Path) -> template.ChatTemplate:
    return _load(tokenizer_dir, chat_template=str(TEMPLATES / "llama3.jinja"))


@pytest.fixture(scope="module")
def deepseek(tokenizer_dir: Path) -> template.ChatTemplate:
    return _load(tokenizer_dir, chat_template=str(TEMPLATES / "deepseek_r1.jinja"))


def test_formats_are_seen_in_the_template(
    qwen: template.ChatTemplate, llama: template.ChatTemplate, deepseek: template.ChatTemplate
) -> None:
    assert [each.tool_format for each in (qwen, llama, deepseek)] == ["hermes", "llama", None]
    assert [each.thinks for each in (qwen, llama, deepseek)] == [True, False, True]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{{ tools }}<tool_call>{{ arguments }}", "hermes"),
        ("{{ tools }}<tool_call>\n<function=name>\n<parameter=x>", None),
        ("{{ tools }}<tool_call>name\n<arg_key>", None),
        ("<tool_call> without a variable of that name", None),
        ("{{ tools }}<|python_tag|>", "llama"),
        ('{{ tools }}Respond in the format {"name": function name, "parameters": dictionary}', "llama"),
        ("{{ tools }}[TOOL_CALLS]", None),
        ("", None),
        ({"default": "x", "tool_use": "{{ tools }}<tool_call>"}, "hermes"),
    ],
)
def test_a_format_of_calls_is_known_or_none(text: Any, found: str | None) -> None:
    assert template.ChatTemplate(Plain(text)).tool_format == found


def test_settings_overrule_what_is_seen(tokenizer_dir: Path) -> None:
    path = str(TEMPLATES / "qwen3.jinja")
    assert _load(tokenizer_dir, chat_template=path, tool_format="none").tool_format is None
    assert _load(tokenizer_dir, chat_template=path, tool_format="llama").tool_format == "llama"
    assert _load(tokenizer_dir, chat_template=path, reasoning="none").reasoning("x<think>") is None
    assert _load(tokenizer_dir, reasoning="think").reasoning("x") == "closed"
    assert _load(tokenizer_dir).reasoning("x<think>") is None


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_template_that_cannot_be_read_makes_its_model_unavailable(
    tokenizer_dir: Path, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "x.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(errors.ModelUnavailable, match="'m'"):
        _load(tokenizer_dir, chat_template=str(path))


def test_a_system_message_and_a_question_are_rendered(
    qwen: template.ChatTemplate, llama: template.ChatTemplate, deepseek: template.ChatTemplate
) -> None:
    assert qwen.render(ASK) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather in Bern?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWeather in Bern?<|eot" in (
        llama.render(ASK)
    )
    assert deepseek.render(ASK).endswith("Weather in Bern?<\uff5cAssistant\uff5c><think>\n")
    assert not deepseek.render(ASK, generation_prompt=False).endswith("<think>\n")


def test_tools_are_shown_as_json(qwen: template.ChatTemplate, llama: template.ChatTemplate) -> None:
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in qwen.render(ASK, tools=TOOLS)
    assert json.dumps(TOOLS[0], indent=4) in llama.render(ASK, tools=TOOLS)
    assert "Environment: ipython" not in llama.render(ASK, tools=[])


def test_variables_reach_the_template(qwen: template.ChatTemplate, llama: template.ChatTemplate) -> None:
    off = qwen.render(ASK, variables={"enable_thinking": False})
    assert off.endswith("assistant\n<think>\n\n</think>\n\n")
    assert "Today Date: 1 May" in llama.render(ASK, variables={"date_string": "1 May"})
    assert qwen.takes("enable_thinking")
    assert not qwen.takes("enable")
    assert not qwen.takes("reasoning_effort")
    assert llama.takes("date_string")  # which it sets itself where it is not given


@pytest.mark.parametrize(
    "name", ["loop", "message", "if", "tojson", "namespace", "range", "raise_exception", "ns"]
)
def test_words_of_a_template_that_are_no_variables_cannot_be_set(
    name: str, qwen: template.ChatTemplate
) -> None:
    assert not qwen.takes(name)


def test_of_a_template_that_jinja_cannot_read_each_word_may_be_a_variable() -> None:
    for text in ("{% generation %}{{ style }}{% endgeneration %}", "{{ style | filter_of_ours }}"):
        found = template.ChatTemplate(Plain(text))
        assert found.takes("style")
        assert not found.takes("styles")


def test_tools_that_only_a_sentence_speaks_of_are_not_shown() -> None:
    assert template.ChatTemplate(Plain("You have no tools. <tool_call>")).tool_format is None


def test_a_name_of_megabytes_costs_nothing(qwen: template.ChatTemplate) -> None:
    started = time.perf_counter()
    assert not qwen.mentions("x" * 5_000_000)
    assert not qwen.takes("x" * 5_000_000)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("arguments", ['{"city":"Bern"}', {"city": "Bern"}])
def test_arguments_of_earlier_calls_are_objects_where_the_template_wants_objects(
    qwen: template.ChatTemplate, llama: template.ChatTemplate, arguments: Any
) -> None:
    history = [*ASK, _call(arguments), {"role": "tool", "tool_call_id": "call_1", "content": "Rain"}]
    text = qwen.render(history)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>' in text
    assert "<tool_response>\nRain\n</tool_response>" in text
    assert '{"name": "weather", "parameters": {"city": "Bern"}}<|eot_id|>' in llama.render(history)
    assert "ipython<|end_header_id|>\n\n" in llama.render(history)


@pytest.mark.parametrize("arguments", ['{"city":"Bern"}', {"city": "Bern"}])
def test_arguments_of_earlier_calls_are_text_where_the_template_adds_them_to_text(
    deepseek: template.ChatTemplate, arguments: Any
) -> None:
    assert '```json\n{"city":"Bern"}\n```' in deepseek.render([*ASK, _call(arguments)])


@pytest.mark.parametrize("broken", ["{", "3", '["x"]', ""])
def test_arguments_that_are_no_object_reach_the_template_as_they_are(
    qwen: template.ChatTemplate, broken: str
) -> None:
    assert f'"arguments": {broken}}}' in qwen.render([*ASK, _call(broken)])


def test_rendering_leaves_the_messages_alone(qwen: template.ChatTemplate) -> None:
    history = [*ASK, _call("{}")]
    before = json.dumps(history)
    qwen.render(history)
    assert json.dumps(history) == before


@pytest.mark.parametrize(
    "text", ["{{ messages[0].content }}", "{% for c in messages[1].tool_calls %}{% endfor %}"]
)
def test_calls_that_the_template_does_not_show_are_refused(text: str) -> None:
    with pytest.raises(errors.ParameterRefused, match="does not show tool calls") as refused:
        template.ChatTemplate(Plain(text)).render([*ASK, _call("{}")])
    assert refused.value.param == "messages[2].tool_calls"


def test_a_message_is_continued_without_its_end(
    qwen: template.ChatTemplate, llama: template.ChatTemplate, deepseek: template.ChatTemplate
) -> None:
    said = [*ASK, {"role": "assistant", "content": "Rain, I"}]
    for each in (qwen, llama, deepseek):
        text = each.render(said, continue_final=True)
        assert text.endswith("Rain, I")
        assert each.reasoning(text, "Rain, I") in ("closed", None)
    assert llama.render(said).endswith("assistant<|end_header_id|>\n\n")


def test_reasoning_is_open_when_the_prompt_ends_inside_it(
    qwen: template.ChatTemplate, llama: template.ChatTemplate, deepseek: template.ChatTemplate
) -> None:
    assert deepseek.reasoning(deepseek.render(ASK)) == "open"
    assert qwen.reasoning(qwen.render(ASK)) == "closed"
    assert qwen.reasoning(qwen.render(ASK, variables={"enable_thinking": False})) is None
    assert llama.reasoning(llama.render(ASK)) is None
    # What a user writes opens nothing.
    asked = [{"role": "user", "content": "What is <think>"}]
    assert qwen.reasoning(qwen.render(asked)) == "closed"
    assert qwen.reasoning("<think>\nwell", "<think>\nwell") == "open"
    assert qwen.reasoning("<think>x</think>well", "<think>x</think>well") == "closed"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].a.b }}", "no attribute 'a'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for %}", "Expected"),
        ("{{ messages[0].content + messages }}", ""),
        ("{{ raise_exception('x' * 10000) }}", "xxx"),
    ],
)
def test_what_a_template_raises_is_the_requests_fault(text: str, words: str) -> None:
    with pytest.raises(errors.ParameterRefused, match="chat template refused") as refused:
        template.ChatTemplate(Plain(text)).render(ASK)
    assert refused.value.param == "messages"
    assert words in str(refused.value)
    assert len(str(refused.value)) < 400


def test_many_chats_are_rendered_in_their_order_each_with_its_own_refusal(
    llama: template.ChatTemplate,
) -> None:
    said = template.Chat([*ASK, {"role": "assistant", "content": "Rain, I"}], continue_final=True)
    twice = template.Chat([ASK[1], _call("{}") | {"tool_calls": [_call("{}")["tool_calls"][0]] * 2}])
    chats = [template.Chat(ASK), twice, said, template.Chat(ASK, tools=TOOLS), twice]
    found = llama.render_all(chats)
    assert [isinstance(one, errors.ParameterRefused) for one in found] == [False, True, False, False, True]
    assert found[0] == llama.render(ASK)
    assert str(found[2]).endswith("Rain, I")
    assert found[3] == llama.render(ASK, tools=TOOLS)


def test_of_many_chats_only_those_with_calls_need_them_to_be_shown() -> None:
    plain = template.ChatTemplate(Plain("{{ messages[-1].content }}"))
    first, refused, last = plain.render_all([template.Chat(chat) for chat in (ASK, [*ASK, _call("{}")], ASK)])
    assert first == last == ASK[1]["content"]
    assert isinstance(refused, errors.ParameterRefused)
    assert refused.param == "messages[2].tool_calls"


def test_a_template_that_alternates_roles_fails_in_its_own_words(llama: template.ChatTemplate) -> None:
    twice = _call("{}") | {"tool_calls": _call("{}")["tool_calls"] * 2}
    with pytest.raises(errors.ParameterRefused, match="only supports single tool-calls"):
        llama.render([*ASK, twice])


def test_a_model_without_a_template_takes_no_chats() -> None:
    with pytest.raises(errors.ParameterRefused, match="no chat template"):
        template.ChatTemplate(Plain(None)).render(ASK)
