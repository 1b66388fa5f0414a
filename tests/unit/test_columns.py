"""Tables in any width: what gives way, what is cut, and what never is."""

import pytest

from jobs import columns, terminal
from jobs.columns import Bar, Column


def lines(width: int) -> list[str]:
    table = columns.fitted(
        [
            Column("name", ["a-very-long-name"]),
            Column("", [Bar(1, 2, 10)], rank=2),
            Column("count", ["1,234,567"], number=True),
            Column("words", ["some words"], rank=1),
        ],
        width,
    )
    return columns.lines(table, terminal.printer(width))


def test_the_least_important_is_cut_first_then_left_out() -> None:
    assert lines(60)[1] == "a-very-long-name ━━━━━····· 1,234,567 some words"
    assert lines(45)[1] == "a-very-long-name ━━━···· 1,234,567 some words"
    assert lines(42)[1] == "a-very-long-name ━━━··· 1,234,567 some wo…"
    assert lines(35)[1] == "a-very-lon… ━━━··· 1,234,567 some …"
    assert lines(26)[1] == "a-very-l… 1,234,567 some …"
    assert lines(18)[1] == "a-very-… 1,234,567"


@pytest.mark.parametrize("width", range(12, 60))
def test_a_number_is_never_cut(width: int) -> None:
    assert "1,234,567" in lines(width)[1]
    assert max(map(len, lines(width))) <= width


@pytest.mark.parametrize(("done", "bar"), [(0, "····"), (1, "━···"), (4, "━━━━")])
def test_the_rest_of_a_bar_is_another_glyph_than_what_is_done(done: int, bar: str) -> None:
    table = columns.fitted([Column("", [Bar(done, 4, 4)])], 10)
    assert columns.lines(table, terminal.printer(10))[-1] == bar


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    table = columns.fitted([Column("", ["[red]x[/red]"])], 40)
    assert columns.lines(table, terminal.printer(40))[-1] == "[red]x[/red]"


def test_facts_are_whole_or_not_there() -> None:
    assert columns.facts(["1,100 queued", "64 leased", "2 workers"], 25, ", ") == "1,100 queued, 64 leased"
    assert columns.facts(["1,100 queued"], 3, ", ") == "1,100 queued"
