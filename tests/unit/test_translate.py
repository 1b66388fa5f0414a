import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion as TextCompletion
from tokenizers import Tokenizer

from jobs import ids
from jobs.records import PlannedRequest
from tests.unit import planning
from tests.unit import tokenizers_zoo as zoo
from worker import translate
from worker.engine import Completion, EmbeddingRequest, Request, Timings, TokenLogprobs

JOB = planning.record().id
NEUTRAL = {"max_tokens": 4, "temperature": 0.0, "stop": ["x"], "min_tokens": 0, "ignore_eos": False}
TIMES = Timings(1.0, 2.0, 10.0)


def _request(
    endpoint: str = planning.CHAT, prompt_ids: list[int] | None = None, **params: Any
) -> PlannedRequest:
    return PlannedRequest(
        f"{JOB}:4",
        JOB,
        4,
        "a",
        endpoint,
        "m",
        128,
        100.0,
        prompt_ids or [1, 2, 3],
        NEUTRAL | params,
        tenant="t",
    )


def _ids(tokenizer: Tokenizer, *parts: str) -> list[int]:
    """Return the ids of tokens and of texts."""
    found: list[int] = []
    for part in parts:
        known = tokenizer.token_to_id(part)
        found += [known] if known is not None else tokenizer.encode(part, add_special_tokens=False).ids
    return found


def _done(
    tokenizer: Tokenizer, token_ids: list[int], text: str | None = None, reason: str = "stop", **facts: Any
) -> Completion:
    """Return what an engine makes of tokens. `text`: what is left when it was cut."""
    if text is None:
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return Completion("x", token_ids, text, reason, 1, TIMES, **facts)  # type: ignore[arg-type]


def _scores(token_ids: list[int], top: list[int] | None = None) -> list[TokenLogprobs]:
    """Return scores of tokens: -0.1, -0.2, ..."""
    best = tuple((id, -0.01 * rank) for rank, id in enumerate(top or []))
    return [TokenLogprobs(id, -0.1 * place, best) for place, id in enumerate(token_ids, 1)]


def _body(tokenizer: Tokenizer, request: PlannedRequest, completion: Completion) -> dict[str, Any]:
    (row,) = translate.Translator(tokenizer).rows_of(request, completion, "m@1", 0, "w1")
    body: dict[str, Any] = orjson.loads(row.to_json())["line"]["response"]["body"]
    return body


def _chat(tokenizer: Tokenizer, completion: Completion, **params: Any) -> ChatCompletion:
    return ChatCompletion.model_validate(_body(tokenizer, _request(**params), completion), strict=True)


def test_an_engine_request_has_the_parameters_of_its_own_row() -> None:
    request = translate.engine_request(_request())
    assert isinstance(request, Request)
    assert (request.id, request.prompt_ids, request.root, request.job) == (f"{JOB}:4", [1, 2, 3], "t", JOB)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.stop, sampling.temperature) == (4, ("x",), 0.0)
    assert (sampling.n, sampling.logprobs, sampling.grammar, sampling.logit_bias) == (1, None, None, ())
    assert sampling.seed == ids.seed(f"{JOB}:4")


def test_every_parameter_of_a_plan_reaches_the_engine() -> None:
    params = {
        "temperature": 0.7,
        "seed": -5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": [[3, -100.0], [7, 1.5]],
        "logprobs": 0,
        "prompt_logprobs": True,
        "grammar": "start: /a/",
    }
    request = translate.engine_request(_request(answer={"tools": "hermes"}, **params))
    assert isinstance(request, Request)
    wanted = params | {"logit_bias": ((3, -100.0), (7, 1.5))}
    assert {name: getattr(request.sampling, name) for name in params} == wanted
    assert request.sampling.fault() is None
    with pytest.raises(TypeError):
        translate.engine_request(_request(unheard_of=1))


def test_embeddings_go_to_the_engine_with_all_their_inputs() -> None:
    params = {"inputs": [[7], [8, 9]], "dimensions": 2}
    request = PlannedRequest("j:0", "j", 0, "a", "/v1/embeddings", "m", 128, 1.0, [1, 2], params)
    assert translate.engine_request(request) == EmbeddingRequest("j:0", ([1, 2], [7], [8, 9]))
    alone = PlannedRequest("j:0", "j", 0, "a", "/v1/embeddings", "m", 128, 1.0, [1, 2], {})
    assert translate.engine_request(alone) == EmbeddingRequest("j:0", ([1, 2],))


def test_vectors_come_back_as_embeddings() -> None:
    params = {"inputs": [[7]], "encoding": "float"}
    request = PlannedRequest("j:0", "j", 0, "a", "/v1/embeddings", "m", 128, 1.0, [1, 2], params)
    vectors = [[1.0, 0.0], [0.0, 1.0]]
    completion = Completion("j:0", [], "", "stop", 0, Timings(1.0, None, 2.0), embeddings=vectors)
    (row,) = translate.Translator(zoo.byte_level()).rows_of(request, completion, "m@1", 0, "w1")
    assert [one["embedding"] for one in row.line["response"]["body"]["data"]] == vectors
    assert row.usage == (3, 0, 0, 0)
    assert row.metrics
    assert (row.metrics["choices"], row.metrics["completion_tokens"]) == (0, 0)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_times_between_tokens_need_two_tokens(count: int) -> None:
    completion = Completion("x", [7] * count, "t", "length", 0, TIMES)
    (row,) = translate.Translator(zoo.byte_level()).rows_of(_request(), completion, "m@1", 2, "w1")
    assert row.metrics
    assert row.metrics["inter_token_seconds"] == (2.0 if count == 5 else None)
    assert math.isclose(row.metrics["ttft_seconds"], 1.0)
    assert row.metrics["attempts"] == 2
    assert row.usage == (3, 0, count, 0)


def test_choices_begin_with_the_first_and_end_with_the_last_and_have_the_mean_gap() -> None:
    other = Completion("x", [7] * 3, "b", "length", 0, Timings(0.5, 4.0, 16.0))
    first = Completion("x", [7] * 5, "a", "stop", 2, TIMES, others=(other,))
    (row,) = translate.Translator(zoo.byte_level()).rows_of(_request(n=2), first, "m@1", 0, "w1")
    choices = row.line["response"]["body"]["choices"]
    assert [(each["index"], each["message"]["content"]) for each in choices] == [(0, "a"), (1, "b")]
    assert row.usage == (3, 2, 8, 0)
    assert row.metrics
    assert row.metrics["inter_token_seconds"] == (8.0 + 12.0) / (4 + 2)
    assert math.isclose(row.metrics["ttft_seconds"], 1.5)
    assert math.isclose(row.metrics["finished_at"] - row.metrics["started_at"], 15.5, rel_tol=1e-6)


def test_an_error_of_the_engine_is_a_failed_line() -> None:
    completion = Completion("x", [], "", "error", 0, Timings(1.0, None, 1.0), error="out of memory")
    (row,) = translate.Translator(None).rows_of(_request(), completion, "m@1", 0, "w1")
    assert row.failed
    assert row.line["error"] == {"code": "engine_error", "message": "out of memory"}


@pytest.mark.parametrize("scores", [[TokenLogprobs(7, math.nan)], None])
def test_output_that_cannot_be_written_down_fails_its_request_alone(
    scores: list[TokenLogprobs] | None,
) -> None:
    completion = Completion("x", [7], "t", "length", 0, TIMES, logprobs=scores)
    (row,) = translate.Translator(zoo.byte_level()).rows_of(_request(logprobs=0), completion, "m@1", 0, "w1")
    assert row.failed
    assert row.line["response"] is None
    assert row.line["error"]["code"] == "engine_error"


def test_tokens_outside_of_the_text_have_no_log_probabilities() -> None:
    tokenizer = zoo.byte_level()
    ended = _ids(tokenizer, "Hello", "<|im_end|>")
    found = _chat(tokenizer, _done(tokenizer, ended, logprobs=_scores(ended)), logprobs=0)
    assert found.choices[0].logprobs
    content = found.choices[0].logprobs.content or []
    assert b"".join(bytes(one.bytes or []) for one in content) == b"Hello"
    assert all(one.top_logprobs == [] for one in content)
    assert len(content) == len(ended) - 1


def test_a_stop_string_is_cut_from_the_log_probabilities_by_its_bytes() -> None:
    tokenizer = zoo.sentence_piece()
    token_ids = _ids(tokenizer, "▁Hello", "world", "lo", "a")
    completion = _done(tokenizer, token_ids, text="Hellowo", logprobs=_scores(token_ids))
    found = _chat(tokenizer, completion, logprobs=0)
    assert found.choices[0].message.content == "Hellowo"
    assert found.choices[0].logprobs
    assert [one.token for one in found.choices[0].logprobs.content or []] == ["Hello", "world"]


def test_top_tokens_are_written_as_in_their_place() -> None:
    tokenizer = zoo.sentence_piece()
    token_ids = _ids(tokenizer, "▁Hello", "▁world")
    top = _ids(tokenizer, "▁Hello", "▁world", "<|im_end|>", "<0xE6>")
    completion = _done(tokenizer, token_ids, logprobs=_scores(token_ids, top))
    found = _chat(tokenizer, completion, logprobs=4)
    assert found.choices[0].logprobs
    first, second = found.choices[0].logprobs.content or []
    assert [one.token for one in first.top_logprobs] == ["Hello", "world", "<|im_end|>", "\ufffd"]
    assert [one.token for one in second.top_logprobs] == [" Hello", " world", "<|im_end|>", "\ufffd"]
    assert second.top_logprobs[3].bytes == [0xE6]


@given(st.data())
def test_bytes_of_log_probabilities_join_to_the_text_wherever_it_is_cut(data: st.DataObject) -> None:
    tokenizer = zoo.byte_level()
    words = st.sampled_from(["東京 ", "Hello ", "größer", "🙂", "\n", "<tool_call>"])
    token_ids = tokenizer.encode("".join(data.draw(st.lists(words, max_size=5)))).ids
    whole = tokenizer.decode(token_ids)
    text = whole[: data.draw(st.integers(0, len(whole)))]
    completion = _done(tokenizer, token_ids, text=text, logprobs=_scores(token_ids))
    body = _body(tokenizer, _request(planning.TEXT, logprobs=1), completion)
    found = TextCompletion.model_validate(body, strict=True).choices[0]
    assert found.text == text
    assert found.logprobs
    assert found.logprobs.text_offset is not None
    kept = len(found.logprobs.text_offset)
    joined = b"".join(translate.token_text.TokenText(tokenizer).piece(id) for id in token_ids[:kept])
    assert joined.startswith(text.encode())
    assert not kept or found.logprobs.text_offset[-1] < len(text)


def test_completions_keep_the_space_that_follows_the_prompt() -> None:
    tokenizer = zoo.sentence_piece()
    prompt, token_ids = _ids(tokenizer, "<s>", "▁Hello"), _ids(tokenizer, "▁world", "lo", "a")
    for text, wanted in (("worldloa", " worldloa"), ("worl", " worl"), ("worldl", " worldl")):
        completion = _done(tokenizer, token_ids, text=text)
        found = _body(tokenizer, _request(planning.TEXT, prompt), completion)["choices"][0]
        assert found["text"] == wanted
        echoed = _body(tokenizer, _request(planning.TEXT, prompt, answer={"echo": True}), completion)
        assert echoed["choices"][0]["text"] == "Hello" + wanted


def test_an_echo_has_the_prompt_before_the_text_and_its_tokens_before_the_others() -> None:
    tokenizer = zoo.sentence_piece()
    prompt, token_ids = _ids(tokenizer, "<s>", "▁Hello", "lo"), _ids(tokenizer, "▁world", "<|im_end|>")
    prompt_scores = [None, *_scores(prompt[1:], prompt[1:])]
    completion = _done(tokenizer, token_ids, logprobs=_scores(token_ids), prompt_logprobs=prompt_scores)
    request = _request(planning.TEXT, prompt, answer={"echo": True}, logprobs=2, prompt_logprobs=True)
    body = _body(tokenizer, request, completion)
    found = body["choices"][0]
    assert found["text"] == "Hellolo world"
    assert found["logprobs"]["tokens"] == ["<s>", "Hello", "lo", " world", "<|im_end|>"]
    assert found["logprobs"]["text_offset"] == [0, 0, 5, 7, 13]
    assert found["logprobs"]["token_logprobs"][0] is None
    assert found["logprobs"]["top_logprobs"][:2] == [None, {"Hello": 0.0, "lo": -0.01}]
    # As many as the usage says: evaluation harnesses find the end of a context by counting.
    assert len(found["logprobs"]["tokens"]) == body["usage"]["total_tokens"]
    # The typed client has no place for the missing first number.
    found["logprobs"]["token_logprobs"][0], found["logprobs"]["top_logprobs"][0] = 0.0, {}
    TextCompletion.model_validate(body, strict=True)


def test_reasoning_is_counted_in_tokens() -> None:
    tokenizer = zoo.byte_level()
    thought, rest = _ids(tokenizer, "hm, well", "</think>"), _ids(tokenizer, "\n\nHello", "<|im_end|>")
    found = _chat(tokenizer, _done(tokenizer, thought + rest), answer={"reasoning": "open"})
    assert found.choices[0].message.content == "Hello"
    assert found.choices[0].message.model_extra == {"reasoning_content": "hm, well"}
    assert found.usage
    assert found.usage.completion_tokens_details
    assert found.usage.completion_tokens_details.reasoning_tokens == len(thought)
    endless = _chat(tokenizer, _done(tokenizer, rest), answer={"reasoning": "open"})
    assert endless.usage
    assert endless.usage.completion_tokens_details
    assert endless.usage.completion_tokens_details.reasoning_tokens == len(rest) - 1


def test_the_sum_of_reasoning_tokens_reaches_the_usage_of_the_row() -> None:
    tokenizer = zoo.byte_level()
    token_ids = _ids(tokenizer, "<think>", "hm", "</think>", "Hello")
    request = _request(answer={"reasoning": "closed"}, n=2)
    completion = _done(tokenizer, token_ids, others=(_done(tokenizer, token_ids),))
    (row,) = translate.Translator(tokenizer).rows_of(request, completion, "m@1", 0, "w1")
    thought = len(_ids(tokenizer, "<think>", "hm", "</think>"))
    assert row.usage == (3, 1, 2 * len(token_ids), 2 * thought)


def test_special_marks_of_reasoning_are_seen_and_a_stop_string_still_cuts() -> None:
    tokenizer = zoo.byte_level()
    token_ids = _ids(tokenizer, "<think>", "hm", "</think>", "Hello world")
    completion = _done(tokenizer, token_ids, text="hmHello w")
    found = _chat(tokenizer, completion, answer={"reasoning": "closed"})
    assert found.choices[0].message.content == "Hello w"
    assert found.choices[0].message.model_extra == {"reasoning_content": "hm"}


def test_an_echo_has_the_special_tokens_that_somebody_wrote() -> None:
    tokenizer = zoo.byte_level()
    prompt, token_ids = _ids(tokenizer, "<|im_end|>", "Hello"), _ids(tokenizer, "lo")
    request = _request(planning.TEXT, prompt, answer={"echo": True})
    found = _body(tokenizer, request, _done(tokenizer, token_ids))["choices"][0]
    assert found["text"] == "<|im_end|>Hellolo"
