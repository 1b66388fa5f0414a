import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import checks, lines
from tests.unit import planning


def _refusal(data: bytes | None) -> tuple[str, str | None, str]:
    with pytest.raises(checks.LineRefused) as refused:
        checks.check(lines.Line(7, data), planning.record(), 1000)
    found = refused.value.error
    assert found.line == 7
    return found.code, found.param, found.message


def _changed(**changed: object) -> bytes:
    return orjson.dumps(planning.request() | changed)


def _without(name: str) -> bytes:
    whole = planning.request()
    del whole[name]
    return orjson.dumps(whole)


def test_a_good_line_is_taken_as_it_is() -> None:
    found = checks.check(lines.Line(3, planning.line(" a ")), planning.record(), 1000)
    assert found == checks.InputLine(3, " a ", "m", planning.request()["body"])


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"[1,2]", "an array"),
        (b'"x"', "a string"),
        (b"null", "null"),
        (b"3", "a number"),
        (b"true", "a boolean"),
        (b"{", "at column 2"),
        (b"\x7fELF\xff", "byte 5 is not UTF-8"),
        (None, "LONGHAUL_MAX_LINE_BYTES"),
    ],
)
def test_a_line_that_is_no_object_is_an_invalid_json_line(data: bytes | None, found: str) -> None:
    code, _, message = _refusal(data)
    assert code == "invalid_json_line"
    assert found in message


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_what_is_missing_or_null_is_named(name: str) -> None:
    for data in (_without(name), _changed(**{name: None})):
        code, param, message = _refusal(data)
        assert (code, param) == ("missing_required_parameter", name)
        assert "missing or null" in message


@pytest.mark.parametrize("body", [[], "x", 3, True])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    assert _refusal(_changed(body=body))[:2] == ("missing_required_parameter", "body")


@pytest.mark.parametrize("model", [None, "", 3, ["m"]])
def test_a_model_that_is_no_name_is_refused(model: object) -> None:
    assert _refusal(_changed(body={"model": model}))[:2] == ("missing_required_parameter", "body.model")


@pytest.mark.parametrize("custom_id", ["", 3, True, ["a"], {}])
def test_a_custom_id_that_is_no_text_is_refused(custom_id: object) -> None:
    assert _refusal(_changed(custom_id=custom_id))[:2] == ("missing_required_parameter", "custom_id")


def test_a_custom_id_counts_characters_not_bytes() -> None:
    longest = "\N{SNOWMAN}" * 512
    assert checks.check(lines.Line(1, _changed(custom_id=longest)), planning.record(), 1).custom_id == longest
    assert _refusal(_changed(custom_id=longest + "x"))[:2] == ("invalid_custom_id", "custom_id")


def test_a_custom_id_with_half_a_surrogate_pair_is_refused() -> None:
    code, param, message = _refusal(_changed(custom_id="@").replace(b"@", b"\\ud83d"))
    assert (code, param) == ("invalid_custom_id", "custom_id")
    message.encode()


@pytest.mark.parametrize("url", ["/v1/embeddings", "/x/v1/chat/completions", "/v1/chat/completions/", "", 3])
def test_a_url_must_equal_the_endpoint(url: object) -> None:
    assert _refusal(_changed(url=url))[:2] == ("invalid_url", "url")


@pytest.mark.parametrize("method", ["GET", "post", "", 3])
def test_a_method_must_be_post(method: object) -> None:
    assert _refusal(_changed(method=method))[:2] == ("invalid_method", "method")


@pytest.mark.parametrize("stream", [True, "yes", 1])
def test_a_stream_is_refused_by_its_own_code(stream: object) -> None:
    data = planning.line(stream=stream)
    assert _refusal(data)[:2] == ("streaming_unsupported", "body.stream")


@pytest.mark.parametrize("stream", [False, None])
def test_no_stream_is_no_stream(stream: object) -> None:
    assert checks.check(lines.Line(1, planning.line(stream=stream)), planning.record(), 1000).refusal is None


@pytest.mark.parametrize("name", ["url", "method"])
def test_a_message_stays_short_whatever_it_quotes(name: str) -> None:
    for value in ("x" * 100_000, orjson.loads(b"[" * 900 + b"]" * 900)):
        message = _refusal(_changed(**{name: "@"}).replace(b'"@"', _dump(value)))[2]
        assert len(message) < 300


def _dump(value: object) -> bytes:
    return orjson.dumps(value) if isinstance(value, str) else b"[" * 900 + b"]" * 900


@pytest.mark.parametrize("content", [b'"\\ud83d"', b"[" * 500 + b"]" * 500])
def test_content_that_cannot_run_fails_its_request_alone(content: bytes) -> None:
    data = planning.line(content="@").replace(b'"@"', content)
    found = checks.check(lines.Line(1, data), planning.record(), 1000)
    assert found.custom_id == "a"
    assert found.refusal


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 2**64 - 1)
    | st.floats()
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["custom_id", "method", "url", "body"])


@given(st.dictionaries(NAMES, JSON, max_size=3), st.dictionaries(st.sampled_from(["model", "stream"]), JSON))
def test_whatever_a_line_holds_it_is_taken_or_refused(changed: dict[str, object], body: object) -> None:
    data = orjson.dumps(planning.request() | {"body": body} | changed)
    try:
        found = checks.check(lines.Line(1, data), planning.record(), 1000)
    except checks.LineRefused as refused:
        orjson.dumps(refused.error.model_dump())
    else:
        assert 0 < len(found.custom_id) <= checks.MAX_CUSTOM_ID


@given(st.binary(max_size=60))
def test_whatever_bytes_a_line_holds_it_is_taken_or_refused(data: bytes) -> None:
    whole = planning.line(content="@").replace(b"@", data)
    for one in (data, whole):
        try:
            checks.check(lines.Line(1, one), planning.record(), 1000)
        except checks.LineRefused as refused:
            orjson.dumps(refused.error.model_dump())
