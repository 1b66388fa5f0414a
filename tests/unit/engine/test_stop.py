"""Stop strings are found wherever tokens begin and end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.stop import StopMatcher


def decode(token_ids: list[int]) -> str:
    """A byte-level tokenizer's decoding: one token a byte."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def run(token_ids: list[int], stop: tuple[str, ...], min_tokens: int = 0) -> tuple[int, str] | None:
    """Feed tokens one by one; return how many it took and the text kept."""
    matcher = StopMatcher(decode, stop, min_tokens)
    for count in range(1, len(token_ids) + 1):
        text = matcher.text_before_stop(token_ids[:count])
        if text is not None:
            return count, text
    return None


def test_a_stop_string_over_several_tokens_is_cut_and_the_text_before_is_kept() -> None:
    assert run(list(b"abcXYZdef"), ("XYZ",)) == (6, "abc")


def test_the_first_of_several_stop_strings_counts() -> None:
    assert run(list(b"one two three"), ("three", "two")) == (7, "one ")
    assert run(list(b"abcd"), ("bcd", "cd", "abcd")) == (4, "")


def test_no_stop_string_no_match() -> None:
    assert run(list(b"abc"), ()) is None
    assert run(list(b"abc"), ("x",)) is None


def test_a_stop_string_of_whole_characters_between_split_ones() -> None:
    text = "äöü€😀 STOP é"
    assert run(list(text.encode()), ("€😀",)) == (len("äöü€😀".encode()), "äöü")


def test_broken_utf8_around_a_stop_string_does_not_hide_it() -> None:
    assert run([0xFF, 0xC3, *b"STOP", 0xE2], ("STOP",)) == (6, "\ufffd\ufffd")


def test_a_match_before_min_tokens_does_not_count() -> None:
    assert run(list(b"a.b.c."), (".",), min_tokens=3) == (4, "a.b")
    assert run(list(b"a.b.c."), (".",), min_tokens=4) == (4, "a.b")
    assert run(list(b"ab"), ("a",), min_tokens=2) is None


def test_a_token_that_decodes_to_nothing_changes_nothing() -> None:
    def skipping(token_ids: list[int]) -> str:
        return decode([id for id in token_ids if id != 0])

    matcher = StopMatcher(skipping, ("bc",))
    seen = [matcher.text_before_stop(list(b"a\0b\0\0c")[:count]) for count in range(1, 7)]
    assert seen == [None] * 5 + ["a"]


def test_many_characters_in_one_token_are_searched_too() -> None:
    words = ["Hello", ", world! END", " more"]
    matcher = StopMatcher(lambda ids: "".join(words[id] for id in ids), ("! E",))
    assert [matcher.text_before_stop([0]), matcher.text_before_stop([0, 1])] == [None, "Hello, world"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*"abc€é", "\ufffe"]), max_size=30).map("".join),
    st.lists(st.text("abc€é", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 5), min_size=1),
)
def test_the_result_is_that_of_decoding_everything_at_every_step(
    text: str, stop: tuple[str, ...], lengths: list[int]
) -> None:
    """Tokens of several bytes that end anywhere, characters included."""
    data = text.encode()
    pieces: list[bytes] = []
    while data:
        size = lengths[len(pieces) % len(lengths)]
        pieces.append(data[:size])
        data = data[size:]

    def joined(token_ids: list[int]) -> str:
        return b"".join(pieces[id] for id in token_ids).decode("utf-8", errors="replace")

    matcher = StopMatcher(joined, stop)
    for count in range(1, len(pieces) + 1):
        whole = joined(list(range(count)))
        positions = [whole.find(s) for s in stop if s in whole]
        expected = whole[: min(positions)] if positions else None
        assert matcher.text_before_stop(list(range(count))) == expected
        if expected is not None:
            break


def test_the_whole_text_is_cut_by_the_same_rules() -> None:
    matcher = StopMatcher(decode, (".",), min_tokens=3)
    for count in range(1, 4):
        assert matcher.text_before_stop(list(b"a.b")[:count]) is None
    assert matcher.cut("a.bc") is None
    assert matcher.cut("a.bc.d") == "a.bc"
    assert StopMatcher(decode, ()).cut("a.b") is None
