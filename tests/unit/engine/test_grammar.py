"""What a grammar lets a model say: only what it describes, whatever the tokens are, and each row alone."""

import functools
import itertools
import json
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from jobs import grammars
from tests.unit.engine import grammar_walks
from worker.engine import smollm2
from worker.engine.grammar import Constraint, GrammarFailed, Grammars, fill

ENDS = frozenset((0, 2))
VOCABULARY = 49_152 + 128
"""Of the logits: a model's matrix is often larger than its tokenizer."""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'


def load(*added: AddedToken) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.ensure())
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load()


@pytest.fixture(scope="module")
def opened(tokenizer: Any) -> Iterator[Grammars]:
    opened = Grammars(tokenizer, VOCABULARY, ENDS)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def walker(tokenizer: Any) -> grammar_walks.Walker:
    return grammar_walks.Walker(tokenizer, VOCABULARY, ENDS)


def schema_grammar(schema: Any) -> str:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    text = grammars.build(wanted, [], "none", None, None, True)
    assert text is not None
    return text


def calls_grammar(**changed: Any) -> str:
    asked: dict[str, Any] = {
        "response_format": None,
        "tools": [TOOL],
        "tool_choice": "auto",
        "tool_format": "hermes",
        "reasoning": None,
        "parallel": True,
    }
    text = grammars.build(**asked | changed)
    assert text is not None
    return text


def follow(constraint: Constraint, ids: list[int]) -> bool:
    """Take tokens, each of them only if the mask allows it; return whether the output may end after them."""
    for id in ids:
        logits = torch.zeros(VOCABULARY)
        constraint.restrict(logits)
        if logits[id] != 0:
            raise GrammarFailed(f"not allowed: {id}")
        constraint.take(id)
    logits = torch.zeros(VOCABULARY)
    constraint.restrict(logits)
    return bool(logits[2] == 0)


@pytest.fixture(scope="module")
def ends_after(tokenizer: Any, opened: Grammars) -> Any:
    """Tell whether an output may end after a text; None when the text cannot be written at all."""

    def ends_after(grammar: str, text: str) -> bool | None:
        try:
            return follow(opened.open(grammar), tokenizer.encode(text, add_special_tokens=False))
        except GrammarFailed:
            return None

    return ends_after


@pytest.mark.parametrize("name", grammar_walks.accepted())
def test_whatever_a_model_writes_is_json_that_validates(
    name: str, opened: Grammars, walker: grammar_walks.Walker
) -> None:
    schema = grammar_walks.accepted()[name]
    texts = [walker.write(opened.open(schema_grammar(schema)), seed) for seed in range(4)]
    ended = [text for text in texts if text is not None]
    assert ended
    for text in ended:
        grammar_walks.check(text, schema)


@pytest.mark.parametrize("format", ["hermes", "llama"])
@pytest.mark.parametrize("name", ["recursive_root", "ref_to_a_property", "own_id", "weather_tool", "ref"])
def test_a_required_call_has_arguments_that_validate(
    name: str, format: str, opened: Grammars, walker: grammar_walks.Walker
) -> None:
    schema = grammar_walks.accepted()[name]
    if name == "own_id":
        schema = schema | {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammar = calls_grammar(tools=[tool], tool_choice="required", tool_format=format, parallel=False)
    for seed in range(4):
        text = walker.write(opened.open(grammar), seed)
        if text is not None:
            for marker in ("<tool_call>", "</tool_call>", "<|python_tag|>"):
                text = text.replace(marker, "")
            call = json.loads(text)
            assert call["name"] == "f"
            grammar_walks.check(json.dumps(call["arguments" if format == "hermes" else "parameters"]), schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("flat_object", '{"name": "a", "age": "b'),
        ("flat_object", '{"age'),
        ("closed_object", '{"name": "a", "age": 1, '),
        ("enum_of_strings", '"red g'),
        ("integer_range", "346"),
        ("integer_range", "1.5"),
        ("string_length", '"123456789'),
        ("pattern", '"AB-12"'),
        ("array_with_limits", "[1, 2, 3, 4, "),
        ("tuple", '["a", "b'),
        ("one_of_tagged", '{"kind": "cat", "name"'),
        ("recursive_tree", '{"value": 1, "children": [{"value": "'),
        ("const", '{"kind": "other'),
        ("any_object", "```json"),
        ("any_object", "Here"),
        ("any_object", " {"),
        ("any_object", '{"a":   1'),
        ("any_object", '{"a":\n\n1'),
        ("any_object", "{} "),
        ("string", '"a\nb'),
        ("string", '"\\ud800'),
        ("number", "NaN"),
        ("number", "01"),
    ],
)
def test_what_does_not_fit_cannot_be_written(schema: str, text: str, ends_after: Any) -> None:
    assert ends_after(schema_grammar(grammar_walks.accepted()[schema]), text) is None


def test_an_output_may_end_only_when_it_is_whole(opened: Grammars, ends_after: Any) -> None:
    grammar = schema_grammar(grammar_walks.accepted()["closed_object"])
    assert ends_after(grammar, '{"name": "a", "age": 1') is False
    assert ends_after(grammar, '{"name": "a",\n    "age": 1\n}') is True
    with pytest.raises(GrammarFailed, match="cannot end"):
        opened.open(grammar).take(2)


def test_an_output_that_nothing_can_follow_is_complete(opened: Grammars, tokenizer: Any) -> None:
    constraint = opened.open(schema_grammar({"enum": ["yes", "no"]}))
    *before, last = tokenizer.encode('"yes"')
    assert [constraint.take(id) for id in before] == [False] * len(before)
    assert constraint.take(last)


def test_each_of_several_end_tokens_is_allowed_at_the_end(opened: Grammars, tokenizer: Any) -> None:
    grammar = schema_grammar({"type": "integer"})
    for end in ENDS:
        constraint = opened.open(grammar)
        assert not constraint.take(tokenizer.encode("7")[0])
        logits = torch.zeros(VOCABULARY)
        constraint.restrict(logits)
        assert all(logits[id] == 0 for id in ENDS)
        assert constraint.take(end)


def test_a_model_without_an_end_token_ends_where_the_grammar_does(tokenizer: Any) -> None:
    endless = Grammars(tokenizer, VOCABULARY, frozenset())
    constraint = endless.open(schema_grammar({"const": "x"}))
    *before, last = tokenizer.encode('"x"')
    assert [constraint.take(id) for id in before] == [False] * len(before)
    assert constraint.take(last)
    endless.close()


def test_neither_special_tokens_nor_padding_are_ever_allowed(opened: Grammars, tokenizer: Any) -> None:
    for grammar, text in ((schema_grammar({"type": "string"}), '"ab'), (calls_grammar(), "Some text")):
        constraint = opened.open(grammar)
        follow(constraint, tokenizer.encode(text))
        logits = torch.zeros(VOCABULARY)
        constraint.restrict(logits)
        special = [id for id in tokenizer.all_special_ids if id not in ENDS]
        assert special
        assert torch.isinf(logits[special]).all()
        assert torch.isinf(logits[len(tokenizer) :]).all()


def test_a_text_that_looks_like_a_special_token_is_written_with_other_tokens(
    opened: Grammars, walker: grammar_walks.Walker
) -> None:
    grammar = schema_grammar({"const": "<|im_end|>"})
    assert walker.write(opened.open(grammar), 1) == '"<|im_end|>"'


@pytest.mark.parametrize("special", [None, False, True])
def test_tool_calls_work_whether_the_marker_is_text_or_a_token(special: bool | None) -> None:
    markers = ("<tool_call>", "</tool_call>") if special is not None else ()
    tokenizer = load(*(AddedToken(marker, special=bool(special), normalized=False) for marker in markers))
    opened = Grammars(tokenizer, VOCABULARY, ENDS)
    for grammar in (calls_grammar(), calls_grammar(tool_choice="required")):
        ids = tokenizer.encode(CALL + "\n" + CALL)
        assert (len(tokenizer) - 1 in ids) == bool(markers)
        assert follow(opened.open(grammar), ids)
        with pytest.raises(GrammarFailed):
            follow(opened.open(grammar), tokenizer.encode("<tool_call> I think"))
        with pytest.raises(GrammarFailed):
            follow(opened.open(grammar), tokenizer.encode(CALL + " and more"))
    opened.close()


@pytest.mark.parametrize(
    ("changed", "text", "ends"),
    [
        ({}, "", True),
        ({}, "Hello <tool_ca", True),
        ({}, "Let me see.\n" + CALL, True),
        ({}, CALL + CALL, True),
        ({}, CALL[:-3], False),
        ({}, '<tool_call>{"name": "other', None),
        ({}, '<tool_call>{"name": "weather", "arguments": {"days": 3', None),
        ({"parallel": False}, CALL, True),
        ({"parallel": False}, CALL + "\n<", None),
        ({"tool_choice": "required"}, "", False),
        ({"tool_choice": "required"}, "Let", None),
        ({"tool_choice": "required"}, CALL + "\n" + CALL, True),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, CALL, True),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, CALL + "\n<", None),
        ({"reasoning": "closed"}, "<think>\nA <tool_call> x\n</think>\n\n" + CALL, True),
        ({"reasoning": "closed"}, "<think>\nA <tool_call> x", True),
        ({"reasoning": "closed"}, "<think></think>\n<tool_call> x", None),
        ({"reasoning": "closed"}, "<thinking is hard", True),
        ({"reasoning": "open"}, "A <tool_call> x\n</think>\n\nHello", True),
        ({"reasoning": "open"}, "A </think>\n\n" + CALL, True),
        ({"reasoning": "open"}, "A </think>\n\n<tool_call> x", None),
        ({"reasoning": "open", "tool_choice": "required"}, "A", False),
        ({"reasoning": "open", "tool_choice": "required"}, "A</think>\n\n" + CALL, True),
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', True),
        ({"response_format": {"type": "json_object"}}, CALL, True),
        ({"response_format": {"type": "json_object"}}, "Hello", None),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, "<", None),
        ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, "{", None),
        (
            {"response_format": {"type": "json_object"}, "reasoning": "closed"},
            '<think>x</think>\n\n{"a',
            False,
        ),
        ({"response_format": {"type": "json_object"}, "reasoning": "open"}, "{", False),
        ({"response_format": {"type": "json_object"}, "reasoning": "open"}, "x</think>Hello", None),
    ],
)
def test_hermes_calls(changed: Any, text: str, ends: bool | None, ends_after: Any) -> None:
    assert ends_after(calls_grammar(**changed), text) is ends


LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("changed", "text", "ends"),
    [
        ({}, "", True),
        ({}, "\n\n", True),
        ({}, 'Hello {"name": 1', True),
        ({}, LLAMA, True),
        ({}, "\n\n" + LLAMA, True),
        ({}, f"{LLAMA}; {LLAMA}", True),
        ({}, f"{LLAMA}\n{LLAMA}", True),
        ({}, "<|python_tag|>" + LLAMA, True),
        ({}, "<|python_tag|>print(1)", None),
        ({}, '{"name": "other', None),
        ({}, '{"answer', None),
        ({}, LLAMA + " and", None),
        ({"parallel": False}, LLAMA + ";", None),
        ({"tool_choice": "required"}, "H", None),
        ({"reasoning": "closed"}, "<think>{x</think>\n\n" + LLAMA, True),
        ({"reasoning": "closed"}, "<think>x</think>\n\nHello", True),
        ({"response_format": {"type": "json_object"}}, '{"answer": [1]}', True),
        ({"response_format": {"type": "json_object"}}, LLAMA, True),
        ({"response_format": {"type": "json_object"}}, "Hello", None),
    ],
)
def test_llama_calls(changed: Any, text: str, ends: bool | None, ends_after: Any) -> None:
    assert ends_after(calls_grammar(tool_format="llama", **changed), text) is ends


def test_what_a_gpu_does_with_a_mask_is_what_a_cpu_does(opened: Grammars) -> None:
    constraint = opened.open(schema_grammar({"type": "string"}))
    by_bias = torch.randn(VOCABULARY)
    by_bits = by_bias.clone()
    constraint.restrict(by_bias)
    fill(by_bits, torch.from_numpy(constraint._mask.words))
    assert torch.equal(by_bias, by_bits)
    assert torch.isfinite(by_bits).any()


def test_free_text_stays_as_free_as_without_tools(opened: Grammars, tokenizer: Any) -> None:
    """Every token that spells text is allowed where text goes on; the others spell parts of a character."""
    constraint = opened.open(calls_grammar())
    follow(constraint, tokenizer.encode("Well, "))
    logits = torch.zeros(VOCABULARY)
    constraint.restrict(logits)
    refused = [id for id in range(17, len(tokenizer)) if logits[id] != 0]
    assert all("\N{REPLACEMENT CHARACTER}" in tokenizer.decode([id]) for id in refused)
    follow(constraint, tokenizer.encode("naïve 東京 😀 \t\u00a0 ```x``` </s> {}"))


def test_a_row_does_not_depend_on_the_others(opened: Grammars, walker: grammar_walks.Walker) -> None:
    names = ["flat_object", "recursive_tree", "invoice", "any_of"]
    schemas = [schema_grammar(grammar_walks.accepted()[name]) for name in names]
    work = list(itertools.product(schemas, range(3)))
    alone = [walker.write(opened.open(grammar), seed) for grammar, seed in work]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda item: walker.write(opened.open(item[0]), item[1]), work))
    assert together == alone


def test_a_grammar_is_compiled_once_and_constraints_do_not_share_a_state(
    opened: Grammars, tokenizer: Any
) -> None:
    grammar = schema_grammar({"enum": ["once", "and again"]})
    first, second = opened.open(grammar), opened.open(grammar)
    for id in tokenizer.encode('"once"'):
        first.take(id)
    assert follow(second, tokenizer.encode('"and again"'))
    assert first._compiled is second._compiled


def test_a_grammar_that_does_not_compile_fails_alone(opened: Grammars, ends_after: Any) -> None:
    broken = opened.open("start: nothing\n")
    broken.prepare()
    for call in (
        functools.partial(broken.restrict, torch.zeros(VOCABULARY)),
        functools.partial(broken.take, 5),
    ):
        with pytest.raises(GrammarFailed, match="nothing") as raised:
            call()
        assert "\n" not in str(raised.value)
    assert ends_after(schema_grammar({"type": "integer"}), "12") is True


def test_a_token_that_was_not_allowed_fails_its_row_alone(opened: Grammars, tokenizer: Any) -> None:
    grammar = schema_grammar({"type": "integer"})
    wrong, right = opened.open(grammar), opened.open(grammar)
    with pytest.raises(GrammarFailed):
        wrong.take(tokenizer.encode("x")[0])
    with pytest.raises(GrammarFailed):
        wrong.restrict(torch.zeros(VOCABULARY))
    assert follow(right, tokenizer.encode("12"))


def test_a_panic_of_the_library_fails_its_row_alone(opened: Grammars, monkeypatch: Any) -> None:
    class Panic(BaseException):
        """What a panic in Rust arrives as."""

    def panic(self: Constraint) -> None:
        raise Panic("index out of bounds")

    constraint = opened.open(schema_grammar({"type": "integer"}))
    monkeypatch.setattr(Constraint, "_opened", panic)
    with pytest.raises(GrammarFailed, match="Panic: index out of bounds"):
        constraint.restrict(torch.zeros(VOCABULARY))
    with pytest.raises(GrammarFailed, match="Panic: index out of bounds"):
        constraint.take(5)


def test_a_tokenizer_that_is_not_fast_is_refused_with_the_reason() -> None:
    slow = Grammars(object(), VOCABULARY, ENDS)  # type: ignore[arg-type]
    with pytest.raises(GrammarFailed, match="fast tokenizer"):
        slow.open(schema_grammar({"type": "integer"})).take(5)
    slow.close()


def test_preparing_returns_before_the_grammar_is_compiled(tokenizer: Any) -> None:
    fresh = Grammars(tokenizer, VOCABULARY, ENDS)
    constraint = fresh.open(schema_grammar({"type": "integer"}))
    constraint.prepare()
    assert not constraint._compiled.done()  # the vocabulary alone takes a tenth of a second
    constraint.restrict(torch.zeros(VOCABULARY))
    fresh.close()


def test_a_constraint_is_forgotten_though_its_grammar_is_remembered(tokenizer: Any) -> None:
    fresh = Grammars(tokenizer, VOCABULARY, ENDS)
    constraint = fresh.open(schema_grammar({"type": "integer"}))
    constraint.prepare()
    assert not constraint.compiled
    constraint.restrict(torch.zeros(VOCABULARY))
    kept = weakref.ref(constraint)
    del constraint
    fresh.close()  # its threads may hold it a moment longer than its mask takes
    assert fresh._compiled
    assert kept() is None


def test_a_constraint_that_waits_holds_no_masks(opened: Grammars) -> None:
    constraint = opened.open(schema_grammar({"type": "integer"}))
    assert constraint._compiled.result() is not None
    assert "_mask" not in vars(constraint)


def test_closing_wakes_who_waits_for_a_mask(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    compile = Grammars._compile

    def slowly(self: Grammars, text: str) -> Any:
        begun.set()
        go_on.wait(60)
        return compile(self, text)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    fresh = Grammars(tokenizer, VOCABULARY, ENDS)
    constraints = [fresh.open(schema_grammar({"maximum": i, "type": "integer"})) for i in range(3)]
    for constraint in constraints:
        constraint.prepare()
    assert begun.wait(60)
    closing = threading.Thread(target=fresh.close)
    closing.start()
    for constraint in constraints[1:]:
        with pytest.raises(GrammarFailed, match="Cancelled"):
            constraint.restrict(torch.zeros(VOCABULARY))
    go_on.set()
    constraints[0].restrict(torch.zeros(VOCABULARY))
    closing.join(60)
    assert not closing.is_alive()
