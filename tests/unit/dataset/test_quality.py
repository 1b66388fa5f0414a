import time

import pytest

from jobs.dataset import quality


def test_each_refusal_has_the_reason_that_comes_first_and_is_counted() -> None:
    filters = quality.Filters(min_chars=3, max_chars=5, match="^[a-z]", reject="bad")
    reasons = [filters.reason(text) for text in ("", "abcdef", "1bad", "abad", "abc", "abcde")]
    assert reasons == ["min-chars", "max-chars", "match", "reject", None, None]
    assert filters.counts == {"min-chars": 1, "max-chars": 1, "match": 1, "reject": 1}


def test_without_filters_everything_stays() -> None:
    assert quality.Filters().reason("") is None


def test_characters_are_counted_not_bytes() -> None:
    assert quality.Filters(max_chars=2).reason("日本") is None
    assert quality.Filters(min_chars=2).reason("😀") == "min-chars"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("^日.$", "日本"), ("(?i)ÄB", "äb"), ("", ""), (r"(?s)a.b", "a\nb"), (r"\p{Greek}", "λ")],
)
def test_expressions_are_unicode_and_found_anywhere(pattern: str, text: str) -> None:
    assert quality.Filters(match=pattern).reason(text) is None
    assert quality.Filters(reject=pattern).reason(text) == "reject"


def test_a_text_that_is_no_unicode_is_filtered_as_well() -> None:
    assert quality.Filters(match="^x.y$").reason("x\ud800y") is None


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", r"(a)\1", "(?=a)", "((a{500}){500}){500}", "\ud800"])
def test_a_bad_expression_is_refused_with_the_option_and_the_expression(pattern: str) -> None:
    with pytest.raises(quality.BadExpression, match="--reject") as caught:
        quality.Filters(reject=pattern)
    assert repr(pattern) in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_expression_that_backtracks_elsewhere_takes_no_time() -> None:
    start = time.perf_counter()
    assert quality.Filters(match=r"^(a+)+$").reason("a" * 50_000 + "!") == "match"
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(("least", "most"), [(-1, None), (None, -5), (3, 2)])
def test_lengths_that_no_text_has_are_refused(least: int | None, most: int | None) -> None:
    with pytest.raises(quality.BadLengths, match=r"--(min|max)-chars"):
        quality.Filters(least, most)
