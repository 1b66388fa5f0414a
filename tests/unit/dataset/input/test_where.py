import pyarrow as pa
import pytest

from jobs.dataset.input import input_errors, source
from tests.unit.dataset.reading import read

TABLE = pa.table(
    {
        "id": [1, 2, 3, 4],
        "text": ["one", "three", None, "7"],
        "lang": ["en", "de", "en", None],
        "meta": [{"lang": "de"}, {"lang": "en"}, None, {"lang": None}],
        "Odd Name": [1.0, 2.0, 3.0, 4.0],
    }
)


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ("len(text) < 4", [0, 3]),
        ("lang = 'en' and id > 1", [2]),
        ("meta.lang = 'de'", [0]),
        ("rows.meta.lang = 'de'", [0]),
        ("LEN(Text) < 4 -- a comment", [0, 3]),
        ('"Odd Name" between 2 and 3', [1, 2]),
        ("lang is null or text is null", [2, 3]),
        ("text ilike 'T%' or try_cast(text as int) = 7", [1, 3]),
        ("case when id = 2 then true end", [1]),
        ("list_contains([1, 4], id)", [0, 3]),
        ("len(list_filter([1, 2, 3], lambda x: x > id)) = 2", [0]),
        ("true", [0, 1, 2, 3]),
        ("id > 9", []),
    ],
)
def test_rows_are_kept_for_which_it_is_true_and_null_is_not(where: str, numbers: list[int]) -> None:
    assert read(TABLE, where=where)[0] == numbers


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("1=1; COPY (SELECT 1) TO '/tmp/longhaul-was-here'", "syntax error"),
        ("1=1); COPY (SELECT 1) TO '/tmp/longhaul-was-here'; SELECT (1", "Only SELECT"),
        ("1=1); SELECT (true", "one expression"),
        ("(select count(*) from read_csv('/etc/passwd')) > 0", "query"),
        ("exists (from read_text('/etc/passwd'))", "query"),
        ("id in (select 1)", "query"),
        ("true) union all (select true", "one expression"),
        ("true) from (select 1", "one expression"),
        ("true), (false", "one expression"),
        ("true) order by (1", "one expression"),
        ("true) limit (1", "one expression"),
        ("read_text('/etc/passwd') = ''", "table function"),
        ("count(*) > 0", "aggregates"),
        ("row_number() over () = 1", "window"),
        ("unnest([true, false])", "UNNEST"),
        ("random() < 0.1", "another value each time"),
        ("columns(*) is null", "name the columns"),
        ("id = ?", "parameters"),
        ("id = $1", "parameters"),
        ("id", "BIGINT, not true or false"),
        ("", "empty"),
        ("id = /* 1", "comment"),
        ("nosuch(id)", "nosuch"),
    ],
)
def test_what_is_no_condition_on_a_row_is_refused_at_once(where: str, said: str) -> None:
    with pytest.raises(input_errors.WhereRefused, match=said):
        source.open_source(TABLE, where=where)


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(input_errors.ColumnMissing, match=r"'txt'\. Did you mean 'text'.* id, text, lang"):
        source.open_source(TABLE, where="len(txt) > 1")


def test_a_row_it_fails_for_is_a_fault_and_the_others_go_on() -> None:
    numbers, rows, faults = read(TABLE, columns=["id"], where="cast(text as int) > 1")
    assert (numbers, rows) == ([3], [{"id": 4}])
    assert [(fault.row, fault.where) for fault in faults] == [(0, "the table row 0"), (1, "the table row 1")]
    assert "'one'" in faults[0].message
    assert "'three'" in faults[1].message


def test_rows_it_fails_for_keep_their_numbers_in_a_long_input() -> None:
    table = pa.table({"v": [str(at) if at % 1000 else "x" for at in range(20_000)]})
    numbers, _, faults = read(table, where="v::int % 5000 = 1")
    assert numbers == [1, 5001, 10_001, 15_001]
    assert [fault.row for fault in faults] == list(range(0, 20_000, 1000))


def test_it_may_use_columns_that_are_not_selected() -> None:
    assert read(TABLE, columns=["text"], where="id = 2")[1] == [{"text": "three"}]


def test_columns_that_differ_in_capitals_are_told_apart_by_their_exact_names() -> None:
    table = pa.table({"a": [1, 2], "A": [2, 1]})
    assert read(table, where="a = 1")[0] == [0]
    assert read(table, where="A = 1")[0] == [1]


def test_local_variables_of_the_program_cannot_be_reached() -> None:
    with pytest.raises(input_errors.InputError):
        source.open_source(TABLE, where="(from TABLE limit 1) is not null")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("Odd Name > 3", 'double quotes: "Odd Name"'),
        ("Odd-Name > 3 and id > 1", 'double quotes: "Odd-Name"'),
        ("order > 3", 'double quotes: "order"'),
        ("text > 3", r"write cast\(text as int\)"),
        ("id > 1 and text between 1 and 3", r"write cast\(text as int\)"),
        ('"Odd Name" > 3', r'write cast\("Odd Name" as int\)'),
    ],
)
def test_what_is_wrong_with_names_and_types_is_said_with_what_would_be_right(where: str, said: str) -> None:
    table = pa.table({"id": [1], "text": ["2"], "Odd Name": ["3"], "Odd-Name": [4], "order": [5]})
    with pytest.raises(input_errors.WhereRefused, match=f"{said}"):
        source.open_source(table, where=where)


def test_a_name_in_quotes_is_not_hinted_at_again() -> None:
    table = pa.table({"Odd Name": [1]})
    with pytest.raises(input_errors.WhereRefused) as caught:
        source.open_source(table, where='"Odd Name" > > 3')
    assert "double quotes" not in str(caught.value)
