"""Templates: what a row makes of them, and what no row may make of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.dataset import prompt, recipe
from jobs.dataset.input import input_errors


def made(text: str, system: str | None = None, continues: str | None = None) -> prompt.Prompt:
    messages = [recipe.Message(role="user", content=text)]
    if system is not None:
        messages.insert(0, recipe.Message(role="system", content=system))
    return prompt.Prompt(messages, continues)


def rendered(text: str, /, **row: Any) -> str:
    return made(text).render(row)[-1]["content"]


@pytest.mark.parametrize(
    ("text", "row", "content"),
    [
        ("{{ a }}, {{ b.c[1] }}", {"a": 1, "b": {"c": [2, 3]}}, "1, 3"),
        ("{{ row['my text'] }} {{ row['1'] }}", {"my text": "x", "1": "y"}, "x y"),
        ("{{ row['if'] }}", {"if": "z"}, "z"),
        ("{{ row }}", {"row": "own"}, "own"),
        ("{{ a | tojson }}", {"a": {"<ü>": None, "b": [1.5, True]}}, '{"<ü>": null, "b": [1.5, true]}'),
        ("{{ row | tojson }}", {"a b": None}, '{"a b": null}'),
        ("{{ a }}", {"a": "{{ b }} {% raw %} <b>&amp;</b>"}, "{{ b }} {% raw %} <b>&amp;</b>"),
        ("{ {} } {a} {{ '{{' }}", {}, "{ {} } {a} {{"),
        ("  é {{ a }}\n\n", {"a": "日本\u2028"}, "  é 日本\u2028\n"),
        (
            "{% for x in a %}{{ loop.index }}:{{ x.y }} {% endfor %}.",
            {"a": [{"y": 1}, {"y": 2}]},
            "1:1 2:2 .",
        ),
        ("{{ a * 3 }}{{ 2 ** 10 }}{{ 2.0 ** 2 }}", {"a": "x"}, "xxx10244.0"),
    ],
)
def test_a_row_is_rendered_as_the_template_says(text: str, row: dict[str, Any], content: str) -> None:
    assert rendered(text, **row) == content


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_of_a_row_comes_through_as_it_is(text: str) -> None:
    assert rendered("a{{ text }}b", text=text) == f"a{text}b"


@pytest.mark.parametrize(
    ("text", "row", "where"),
    [
        ("{{ a }}", {"a": None}, "a"),
        ("{{ a | trim }}", {"a": None}, "a"),
        ("{{ 'x' ~ b ~ a }}", {"a": None, "b": "y"}, "a"),
        ("{{ '%s' % a }}", {"a": None}, "a"),
        ("{{ '{}'.format(a) }}", {"a": None}, "a"),
        ("{{ a.b }}", {"a": {"b": None}}, "a.b"),
        ("{{ a | join(', ') }}", {"a": ["x", None]}, r"a\[1\]"),
        ("{{ a }}", {"a": ["x", None]}, r"a\[1\]"),
        ("{{ row['my text'].b[0] }}", {"my text": {"b": [None]}}, r"my text.b\[0\]"),
        ("{% for x in a %}{{ x.y }}{% endfor %}", {"a": [{"y": 1}, {"y": None}]}, r"a\[1\].y"),
    ],
)
def test_a_null_never_becomes_the_word_none_in_a_prompt(text: str, row: dict[str, Any], where: str) -> None:
    with pytest.raises(prompt.RowUnfit, match=f"^{where} is null, which the template prints"):
        rendered(text, **row)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("{% if a is none %}no{% endif %}", "no"),
        ("{% if a is not none %}{{ a }}{% else %}no{% endif %}", "no"),
        ("{% if a == none and none == a and not a != none %}no{% endif %}", "no"),
        ("{% if not a %}no{% endif %}", "no"),
        ("{{ a or 'no' }}", "no"),
        ("{{ a | default('no', true) }}", "no"),
        ("{{ b | reject('none') | join }}", "xy"),
        ("{{ b | select | join }}", "xy"),
    ],
)
def test_a_template_can_ask_whether_a_value_is_null(text: str, content: str) -> None:
    assert rendered(text, a=None, b=["x", None, "y"]) == content


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ a.c }}", "has no attribute 'c'"),
        ("{{ a['b'].c.d }}", "has no attribute"),
        ("{{ n.b }}", "'null object' has no attribute 'b'"),
        ("{{ 1 / zero }}", "ZeroDivisionError"),
        ("{{ n + 1 }}", "TypeError"),
        ("{% for x in zero %}{% endfor %}x", "TypeError"),
        ("{{ a | dictsort(by='neither') }}", "FilterArgumentError"),
        ("{{ space }}\n", "the prompt is empty"),
        ("{{ '\\ud800' }}", "half of a character"),
    ],
)
def test_a_row_that_breaks_the_template_says_how(text: str, reason: str) -> None:
    with pytest.raises(prompt.RowUnfit, match=reason):
        rendered(text, a={"b": "x"}, n=None, zero=0, space=" \t ")


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ a | attr('__class__') }}",
        "{{ '{0.__class__}'.format(a) }}",
        "{{ '{a.__class__}'.format_map({'a': a}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (range.__self__ or a).__globals__ }}",
        "{{ row.__class__.__base__.__subclasses__() }}",
        "{{ [a] | map(attribute='__class__') | join }}",
        "{{ n.__init__.__globals__ }}",
        "{{ l.append(1) }}",
        "{{ l.clear() }}",
        "{{ d.update({'x': 1}) }}",
        "{% set ns = namespace() %}{{ ns.__class__ }}",
    ],
)
def test_no_template_gets_out_of_the_sandbox(text: str) -> None:
    row = {"a": "x", "n": None, "l": [1], "d": {"y": 2}}
    with pytest.raises(prompt.RowUnfit):
        print(rendered(text, **row))
    assert row == {"a": "x", "n": None, "l": [1], "d": {"y": 2}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "does not come to an end"),
        ("{% for i in range(n) %}x{% endfor %}", "OverflowError"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}",
            "more than 10,000,000",
        ),
        ("{{ 'x' * n }}", "more than 10,000,000"),
        ("{{ n * ['x'] }}", "more than 10,000,000"),
        ("{{ 9 ** 99999999 }}", "too large"),
        ("{{ n ** n }}", "too large"),
    ],
)
@pytest.mark.timeout(20)
def test_a_row_takes_neither_all_memory_nor_all_time(text: str, reason: str) -> None:
    with pytest.raises(prompt.RowUnfit, match=reason):
        rendered(text, n=10**12)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a\n{{ b", 2, "unexpected end"),
        ("{% if a %}", 1, "endif"),
        ("{{ a | nofilter }}", 1, "nofilter"),
        ("\n\n{% if a is notest %}{% endif %}", 3, "notest"),
        ("x\n{% include 'a.txt' %}", 2, "other templates"),
        ("{% if a %}{% import '/etc/passwd' as b %}{% endif %}", 1, "other templates"),
        ("{% extends 'x' %}", 1, "other templates"),
    ],
)
def test_a_text_that_is_no_template_is_refused_before_any_row(text: str, line: int, reason: str) -> None:
    with pytest.raises(prompt.TemplateWrong, match=f"^The prompt, line {line}: .*({reason})"):
        made(text)


def test_of_several_messages_the_one_that_is_wrong_is_named() -> None:
    with pytest.raises(prompt.TemplateWrong, match=r"^Message 1 \(system\), line 1"):
        made("fine", system="{{")


def test_only_the_columns_that_it_looks_at_are_read_in_the_order_of_the_input() -> None:
    assert made("{{ c }}{% if a %}x{% endif %}", system="{% set d = 1 %}{{ d }}").columns("abcd") == [
        "a",
        "c",
    ]


def test_a_template_that_looks_at_the_row_needs_all_columns() -> None:
    assert made("{{ row['my text'] }}").columns(["my text", "b"]) == ["my text", "b"]
    assert made("{{ row }}").columns(["b", "row"]) == ["row"]


def test_a_column_goes_before_what_jinja_has_under_its_name() -> None:
    one = made("{{ dict }} {{ range }}")
    assert one.columns(["range", "x", "dict"]) == ["range", "dict"]
    assert one.render({"range": "a", "dict": "b"})[0]["content"] == "b a"


def test_a_missing_column_is_refused_with_names_that_look_like_it() -> None:
    with pytest.raises(input_errors.ColumnMissing, match=r"no column 'txt'.*'text'"):
        made("{{ txt }}").columns(["text", "id"])
    with pytest.raises(input_errors.ColumnMissing, match="no column 'talk'"):
        made("x", continues="talk").columns(["text"])


def test_an_earlier_conversation_comes_before_the_messages() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    one = made("{{ c }}", continues="talk")
    assert one.columns(["c", "talk", "d"]) == ["c", "talk"]
    assert one.render({"c": "d", "talk": talk}) == [*talk, {"role": "user", "content": "d"}]


@pytest.mark.parametrize("earlier", [None, []])
def test_a_row_without_an_earlier_conversation_is_unfit(earlier: Any) -> None:
    with pytest.raises(prompt.RowUnfit, match="talk has no messages"):
        made("x", continues="talk").render({"talk": earlier})


def test_parts_tell_what_is_constant_and_what_depends_on_which_columns() -> None:
    one = made("Say {{ b | upper }}{% if a %}{{ c }}{% endif %}{{ row.d }}", system="Hi {{ a ~ b }}")
    assert one.parts() == [
        prompt.Part("Hi "),
        prompt.Part("", ("a", "b")),
        prompt.Part("Say "),
        prompt.Part("", ("b",)),
        prompt.Part("", ("a", "c")),
        prompt.Part("", ("row",)),
    ]


def test_a_name_that_a_template_sets_depends_on_what_it_was_set_to() -> None:
    *_, last = made("{% set x = a %}{{ x }}").parts()
    assert last == prompt.Part("", ("a",))


@pytest.mark.parametrize(
    ("text", "row", "named"),
    [
        ("{{ a | map('upper') }}", {"a": ["x"]}, r"generator \(add \| list\)"),
        ("{{ a | map('upper') | tojson }}", {"a": ["x"]}, "generator"),
        ("{{ a.items }}", {"a": {"b": 1}}, "method"),
        ("{{ a.title }}", {"a": "x"}, "method"),
        ("{{ range }}", {}, "function"),
        ("{{ self }}", {"self": "x"}, "TemplateReference"),
    ],
)
def test_what_is_no_value_is_not_printed(text: str, row: dict[str, Any], named: str) -> None:
    with pytest.raises(prompt.RowUnfit, match=f"no value: a .*{named}"):
        rendered(text, **row)


def test_a_field_that_is_called_like_a_method_is_the_field() -> None:
    order = {"items": [1, 2], "count": 2, "get": None}
    assert rendered("{% for i in a.items %}{{ i }}{% endfor %} {{ a.count }}", a=order) == "12 2"
    with pytest.raises(prompt.RowUnfit, match="get is null"):
        rendered("{{ a.get }}", a=order)
    assert rendered("{% for k, v in a.items() %}{{ k }}{{ v }}{% endfor %}", a={"x": 1}) == "x1"


def test_a_prompt_that_would_be_another_one_each_time_is_refused() -> None:
    with pytest.raises(prompt.TemplateWrong, match="no filter 'random'"):
        made("{{ a | random }}")
    with pytest.raises(input_errors.InputError, match="lipsum"):
        made("{{ lipsum() }}").columns(["a"])
