import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.answers import reasoning
from jobs.answers.reasoning import Split


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("open", "\nhm\n</think>\n\nYes.", Split("hm", "Yes.", 12)),
        ("open", "<think>\nhm</think>Yes.", Split("hm", "Yes.", 18)),
        ("open", "hm", Split("hm", "", 2)),
        ("open", "</think>Yes.", Split(None, "Yes.", 8)),
        ("open", "a</think>b</think>c", Split("a", "b</think>c", 9)),
        ("open", "", Split(None, "", 0)),
        ("closed", "<think>\nhm\n</think>\n\nYes.", Split("hm", "Yes.", 19)),
        ("closed", "\n<think>\n\n</think>\n\nYes.", Split(None, "Yes.", 18)),
        ("closed", "<think>hm", Split("hm", "", 9)),
        ("closed", "Yes, </think> is a mark.", Split(None, "Yes, </think> is a mark.", 0)),
        ("closed", "Yes <think>", Split(None, "Yes <think>", 0)),
    ],
)
def test_reasoning_is_split_from_the_answer(form: str, text: str, found: Split) -> None:
    assert reasoning.split(text, form) == found


@given(st.sampled_from(["open", "closed"]), st.text(alphabet="<think>/ \n", max_size=40))
def test_no_text_is_lost_in_between(form: str, text: str) -> None:
    split = reasoning.split(text, form)
    assert text.endswith(split.content)
    assert (split.reasoning or "") in text[: split.end]
    assert split.content == (text[split.end :].lstrip("\n") if split.end else text)
