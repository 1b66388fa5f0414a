import math

import orjson
import pytest
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from jobs import errors
from jobs.answers import logprobs
from jobs.answers.logprobs import Token

TOKENS = [
    Token(b"Hi", -0.5, (Token(b"Hi", -0.5), Token(b"\xe6", -1.5)), 0),
    Token(b"\xe6\x9d", -2.0, (Token(b"a", -1.0), Token(b"\xe6", -math.inf)), 2),
]


def test_the_chat_shape_has_the_bytes_of_each_token() -> None:
    shape = orjson.loads(orjson.dumps(logprobs.chat(TOKENS)))
    content = ChoiceLogprobs.model_validate(shape, strict=True).content
    assert content
    assert [(one.token, one.logprob, one.bytes) for one in content] == [
        ("Hi", -0.5, [72, 105]),
        ("\ufffd", -2.0, [0xE6, 0x9D]),
    ]
    assert [(one.token, one.logprob, one.bytes) for one in content[1].top_logprobs] == [
        ("a", -1.0, [97]),
        ("\ufffd", -9999.0, [0xE6]),
    ]


def test_the_completions_shape_has_the_sampled_token_among_the_top_ones() -> None:
    shape = orjson.loads(orjson.dumps(logprobs.completions(TOKENS)))
    found = Logprobs.model_validate(shape, strict=True)
    assert found.tokens == ["Hi", "\ufffd"]
    assert found.token_logprobs == [-0.5, -2.0]
    assert found.text_offset == [0, 2]
    assert found.top_logprobs == [{"Hi": -0.5, "\ufffd": -1.5}, {"a": -1.0, "\ufffd": -9999.0}]
    assert logprobs.completions([Token(b"a", -1.0)])["top_logprobs"] == [{"a": -1.0}]


def test_the_first_token_of_all_has_no_probability() -> None:
    shape = logprobs.completions([Token(b"a", None), Token(b"b", -1.0)])
    assert shape["token_logprobs"] == [None, -1.0]
    assert shape["top_logprobs"] == [None, {"b": -1.0}]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [logprobs.chat, logprobs.completions])
def test_what_json_cannot_say_is_refused(shape: object, bad: float) -> None:
    assert callable(shape)
    for token in (Token(b"a", bad), Token(b"a", -1.0, (Token(b"b", bad),))):
        with pytest.raises(errors.UnusableOutput, match="not numbers"):
            shape([token])
