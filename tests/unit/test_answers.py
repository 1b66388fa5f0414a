import re
from typing import Any

import orjson
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion as TextCompletion

from jobs import answers
from jobs.answers import Choice, Outcome
from jobs.answers.logprobs import Token
from jobs.records import PlannedRequest
from tests.unit import planning

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
EMBEDDINGS = "/v1/embeddings"


def _request(endpoint: str = planning.CHAT, **params: Any) -> PlannedRequest:
    return PlannedRequest("job:4", "job", 4, "a", endpoint, "m", 128, 100.0, [1, 2, 3], params)


def _body(request: PlannedRequest, *choices: Choice, **facts: Any) -> dict[str, Any]:
    outcome = Outcome(choices, 1, 110.0, 112.5, **facts)
    body = answers.named(answers.body(request, outcome, "m@1"), request.id)
    parsed: dict[str, Any] = orjson.loads(orjson.dumps(body))
    assert parsed == body
    return parsed


def _chat(*choices: Choice, **answer: Any) -> ChatCompletion:
    return ChatCompletion.model_validate(_body(_request(answer=answer), *choices), strict=True)


def test_a_typed_client_reads_a_chat_completion() -> None:
    found = _chat(Choice("hello \u2028", "stop", 2))
    assert found.choices[0].message.content == "hello \u2028"
    assert found.choices[0].message.tool_calls is None
    assert found.choices[0].finish_reason == "stop"
    assert not found.model_extra
    assert not found.choices[0].message.model_extra
    assert found.usage
    assert found.usage.total_tokens == 5
    assert found.usage.prompt_tokens_details
    assert found.usage.prompt_tokens_details.cached_tokens == 1


def test_a_typed_client_reads_a_text_completion() -> None:
    scores = [Token(b"hel", -1.0, (Token(b"hel", -1.0),)), Token(b"lo", -2.0, offset=3)]
    body = _body(_request(planning.TEXT), Choice("hello", "length", 2, scores=scores))
    found = TextCompletion.model_validate(body, strict=True)
    assert found.choices[0].text == "hello"
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].logprobs
    assert found.choices[0].logprobs.tokens == ["hel", "lo"]
    assert found.id.startswith("cmpl-")


def test_a_typed_client_reads_embeddings() -> None:
    request = _request(EMBEDDINGS, inputs=[[1, 2], [5]])
    found = CreateEmbeddingResponse.model_validate(
        _body(request, embeddings=[[1.0, 0.0], [0.0, 0.1], [0.6, 0.8]]), strict=True
    )
    assert [one.index for one in found.data] == [0, 1, 2]
    assert found.data[1].embedding == [0.0, 0.1]
    assert (found.usage.prompt_tokens, found.usage.total_tokens, found.model) == (6, 6, "m")
    packed = _body(_request(EMBEDDINGS, encoding="base64"), embeddings=[[1.0, 0.0]])
    assert packed["data"][0]["embedding"] == "AACAPwAAAAA="


def test_choices_come_in_order_and_their_tokens_are_summed() -> None:
    found = _chat(Choice("a", "stop", 2, reasoning_tokens=1), Choice("b", "length", 5, reasoning_tokens=4))
    assert [(one.index, one.message.content, one.finish_reason) for one in found.choices] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]
    assert found.usage
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (3, 7, 10)
    assert found.usage.completion_tokens_details
    assert found.usage.completion_tokens_details.reasoning_tokens == 5


def test_calls_are_named_and_stand_beside_the_text() -> None:
    found = _chat(Choice(f"Now. {CALL}\n{CALL}", "stop", 9), Choice(CALL, "stop", 9), tools="hermes")
    first, second = found.choices
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "tool_calls")
    assert (first.message.content, second.message.content) == ("Now.", None)
    calls = [call for choice in found.choices for call in choice.message.tool_calls or []]
    assert len({call.id for call in calls}) == len(calls) == 3
    for call in calls:
        assert re.fullmatch(r"call_[0-9a-f]{24}", call.id)
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')


def test_a_rerun_names_calls_alike_and_another_request_does_not() -> None:
    body = answers.body(
        _request(answer={"tools": "hermes"}), Outcome((Choice(CALL, "stop", 9),), 1, 0.0, 1.0), "m@1"
    )
    first, again, other = (answers.named(body, name) for name in ("job:4", "job:4", "job:7"))
    assert first == again
    assert first["id"] != other["id"]
    ids = [each["choices"][0]["message"]["tool_calls"][0]["id"] for each in (first, other)]
    assert len(set(ids)) == 2


def test_an_answer_that_was_cut_says_so_whatever_calls_it_has() -> None:
    found = _chat(Choice(f'{CALL}<tool_call>{{"name"', "length", 9), tools="hermes")
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].message.content == '<tool_call>{"name"'
    assert len(found.choices[0].message.tool_calls or []) == 1


def test_text_without_calls_stays_as_it_is() -> None:
    for format in ("hermes", "llama"):
        found = _chat(Choice(" no calls ", "stop", 3), Choice("", "stop", 1), tools=format)
        assert [one.message.content for one in found.choices] == [" no calls ", ""]
        assert {one.finish_reason for one in found.choices} == {"stop"}


def test_without_parallel_calls_there_is_one() -> None:
    found = _chat(Choice(CALL * 2, "stop", 9), tools="hermes", parallel=False)
    assert len(found.choices[0].message.tool_calls or []) == 1
    assert found.choices[0].message.content is None


def test_calls_are_not_looked_for_unless_they_may_come() -> None:
    assert _chat(Choice(CALL, "stop", 9)).choices[0].message.content == CALL


def test_reasoning_is_kept_apart_from_content_and_calls() -> None:
    text = f"{CALL}?</think>\n\nYes. {CALL}"
    found = _chat(Choice(text, "stop", 9, reasoning_tokens=5), tools="hermes", reasoning="open")
    message = found.choices[0].message
    assert message.content == "Yes."
    assert message.model_extra == {"reasoning_content": f"{CALL}?"}
    assert len(message.tool_calls or []) == 1
    (choice,) = _chat(Choice("hm", "length", 9, reasoning_tokens=9), reasoning="open").choices
    assert (choice.message.content, choice.message.model_extra) == ("", {"reasoning_content": "hm"})
    (choice,) = _chat(Choice("Yes", "stop", 9), reasoning="closed").choices
    assert (choice.message.content, choice.message.model_extra) == ("Yes", {"reasoning_content": None})


def test_a_quantised_model_says_so_once() -> None:
    outcome = Outcome((Choice("a", "stop", 1),), 0, 1.0, 2.0)
    for fingerprint, name in (("m@12ab-int4", "m"), ("m-int4@12ab-int4", "m-int4"), ("m@12ab", "m")):
        request = PlannedRequest("job:4", "job", 4, "a", planning.CHAT, name, 128, 100.0, [1], {})
        expected = "m-int4" if "-int4" in fingerprint else "m"
        assert answers.body(request, outcome, fingerprint)["model"] == expected
