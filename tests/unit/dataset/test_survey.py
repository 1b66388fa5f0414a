"""What is said before any work, by examples that can be checked by hand."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import model_settings, tokens
from jobs.dataset import prompt, recipe, survey
from jobs.dataset.input import source


def looked(
    text: str,
    rows: list[dict[str, Any]],
    samples: int = 1,
    tokenizer: tokens.Tokenizer | None = None,
    **changes: Any,
) -> survey.Survey:
    made_by = recipe.Recipe(
        model="m", fingerprint="f", messages=[recipe.Message(role="user", content=text)], **changes
    )
    made = prompt.Prompt(made_by.messages)
    return survey.survey(source.open_source(rows), made, made_by, tokenizer, samples)


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([], 0),
        (["abcd"], 0),
        (["", ""], 0),
        (["abcd", "abcd"], 0.5),
        (["abcd", "abxy"], 2 / 8),
        (["abxy", "zz", "abcd", "abcz"], (2 + 3) / 14),
        ([[1, 2, 3], [1, 2, 4], [5, 6]], 2 / 8),
        ([[1, 2], [1, 2, 3]], 2 / 5),
    ],
)
def test_what_is_shared_is_what_begins_an_earlier_prompt(prompts: list[Any], shared: float) -> None:
    assert survey.share(prompts) == pytest.approx(shared)


@given(st.lists(st.text("ab", max_size=6), max_size=8))
def test_what_is_shared_is_what_a_tree_of_all_prompts_saves(prompts: list[str]) -> None:
    nodes = {text[:at] for text in prompts for at in range(1, len(text) + 1)}
    total = sum(map(len, prompts))
    assert survey.share(prompts) == pytest.approx((total - len(nodes)) / total if total else 0)


def test_lengths_are_the_least_the_median_and_the_most() -> None:
    found = looked("{{ t }}", [{"t": "x" * n} for n in (5, 1, 9, 2, 3)])
    assert (found.lengths, found.unit, found.sampled) == ((1, 3, 9), "characters", 5)
    assert found.first == [{"role": "user", "content": "xxxxx"}]


def test_tokens_are_those_that_the_model_gets(tokenizer_dir: Path) -> None:
    settings = model_settings.ModelSettings(source=str(tokenizer_dir))
    tokenizer = tokens.Tokenizer.load("m", settings)
    rows = [{"t": "aé"}, {"t": "bb"}]
    raw = looked("{{ t }}", rows, tokenizer=tokenizer, endpoint=recipe.COMPLETION)
    assert raw.unit == "tokens"
    lengths = sorted(map(len, tokenizer.encode_prompts(["aé", "bb"])))
    assert raw.lengths == (lengths[0], sum(lengths) // 2, lengths[1])
    chat = looked("{{ t }}", rows, tokenizer=tokenizer)
    assert chat.lengths is not None
    assert chat.lengths[0] > lengths[0], "the chat template is not counted"


def test_samples_of_a_row_share_their_whole_prompt() -> None:
    rows = [{"t": "ab"}, {"t": "cd"}]
    assert looked("{{ t }}", rows).shared == 0
    assert looked("{{ t }}", rows, samples=4).shared == pytest.approx(3 / 4)


def test_rows_without_a_prompt_are_counted_and_the_first_good_one_is_shown() -> None:
    found = looked("{{ t }}", [{"t": None}, {"t": "b"}, {"t": None}])
    assert (found.sampled, found.unfit) == (1, 2)
    text = "\n".join(found.lines(3, 2))
    assert "  user: b" in text
    assert "2 of the first 3 rows have no prompt" in text
    assert "Rows: 3, 2 samples each" in text


def test_nothing_is_claimed_where_no_row_has_a_prompt() -> None:
    found = looked("{{ t }}", [{"t": None}])
    assert (found.first, found.lengths, found.shared) == (None, None, 0)
    assert "Expected" not in "\n".join(found.lines(1, 1))


def test_only_the_first_thousand_rows_are_looked_at() -> None:
    rows = [{"t": "a"}] * 1000 + [{"t": "long" * 100}] * 5
    found = looked("{{ t }}", rows)
    assert found.sampled == 1000
    assert found.lengths == (1, 1, 1)


def test_a_long_first_prompt_is_cut_and_said_to_be() -> None:
    told = "\n".join(looked("{{ t }}", [{"t": "x" * 5000}]).lines(1, 1))
    assert "(5,000 characters)" in told
    assert len(told) < 3000


REPEATED = [
    {"id": str(n), "kind": "a long kind of thing" if n % 2 else "another kind of it"} for n in range(40)
]


def test_parts_that_would_share_more_in_another_order_are_named_with_how_much() -> None:
    found = looked("{{ id }}: {{ kind }}. Classify this, please.", REPEATED)
    assert found.advice is not None
    assert found.advice.order == ("':'", "'. Classify this, please.'", "kind", "id")
    assert found.advice.now < 0.1
    assert found.advice.shared > 0.9
    told = "\n".join(found.lines(40, 1))
    assert "'. Classify this, please.', kind, id" in told
    assert f"{found.advice.shared:.0%}" in told


@pytest.mark.parametrize(
    "text",
    [
        "Classify this, please: {{ kind }} {{ id }}",
        "{{ kind }}",
        "{{ id }}",
        "no columns",
        "{{ row['id'] }} Classify this, please.",
    ],
)
def test_no_order_is_advised_that_is_not_better_or_not_known(text: str) -> None:
    assert looked(text, REPEATED).advice is None


def test_one_row_gives_no_advice() -> None:
    assert looked("{{ id }}: {{ kind }}. Classify this, please.", REPEATED[:1]).advice is None


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("{{ kind }} {{ id }}", ("kind",)),
        ("{{ id }} {{ kind }}", ()),
        ("{{ kind }} {{ lang }} {{ id }} {{ more }}", ("kind", "lang")),
        ("{{ kind }} {{ row['lang'] }}", ("kind",)),
        ("constant", ()),
    ],
)
def test_rows_are_sorted_by_what_repeats_before_the_first_that_never_does(
    text: str, repeated: tuple[str, ...]
) -> None:
    rows = [row | {"lang": "en", "more": "x"} for row in REPEATED]
    assert looked(text, rows).repeated == repeated


def test_times_with_nanoseconds_can_be_in_a_prompt() -> None:
    stamps = pa.array([1_700_000_000_000_000_001], pa.timestamp("ns"))
    made_by = recipe.Recipe(
        model="m", fingerprint="f", messages=[recipe.Message(role="user", content="{{ t }}")]
    )
    rows = source.open_source(pa.table({"t": stamps}))
    found = survey.survey(rows, prompt.Prompt(made_by.messages), made_by, None, 1)
    assert found.first == [{"role": "user", "content": "2023-11-14 22:13:20"}]
