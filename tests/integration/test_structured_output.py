"""Structured output on a real model: whatever it would rather say, what it says parses and validates."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import grammars
from tests.unit.engine import grammar_walks
from worker.engine import Completion, Engine, EngineConfig, Request, Sampling, smollm2

SCHEMAS = (
    "flat_object", "closed_object", "optional_properties", "nested_objects", "array_with_limits", "tuple",
    "enum_of_strings", "enum_of_kinds", "integer_range", "number_range", "string_length", "pattern",
    "formats", "unicode_keys", "any_of", "one_of_tagged", "ref", "recursive_tree", "recursive_list",
    "weather_tool", "invoice", "const_like_a_special_token",
)  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": grammar_walks.accepted()["weather_tool"]},
}
MOST_TOKENS = 250


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.load(str(smollm2.ensure()), EngineConfig(device="cpu"))
    yield engine
    engine.close()


def prompt(engine: Engine, text: str) -> list[int]:
    chat = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = engine.tokenizer(chat, add_special_tokens=False)["input_ids"]
    return ids


def sampled(grammar: str | None, temperature: float, **more: Any) -> Sampling:
    return Sampling(**({"max_tokens": MOST_TOKENS, "temperature": temperature, "grammar": grammar} | more))


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    return {completion.id: completion for completion in engine.generate(requests)}


def grammar(**changed: Any) -> str | None:
    asked: dict[str, Any] = {
        "response_format": None,
        "tools": [],
        "tool_choice": "auto",
        "tool_format": "hermes",
        "reasoning": None,
        "parallel": False,
    }
    return grammars.build(**asked | changed)


def of_schema(schema: Any) -> str | None:
    return grammar(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


@pytest.mark.timeout(300)
# Greedily, every day: test_a_required_call_is_one_that_validates.
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 1.0])
def test_outputs_of_one_mixed_batch_validate(engine: Engine, temperature: float) -> None:
    schemas = grammar_walks.accepted()
    requests = [
        Request(
            name,
            prompt(engine, f"Answer with JSON for this schema: {json.dumps(schemas[name])}"),
            sampled(of_schema(schemas[name]), temperature, seed=7),
        )
        for name in SCHEMAS
    ]
    free = Request("free", prompt(engine, "Say hello."), sampled(None, temperature, max_tokens=20))
    done = run(engine, [*requests, free])
    assert set(done) == {*SCHEMAS, "free"}
    ended = 0
    for name in SCHEMAS:
        completion = done[name]
        assert completion.finish_reason in ("stop", "length"), (name, completion.error)
        if completion.finish_reason == "stop":
            grammar_walks.check(completion.text, schemas[name])
            ended += 1
        else:
            assert len(completion.token_ids) == MOST_TOKENS
    assert ended >= len(SCHEMAS) * 2 // 3


@pytest.mark.timeout(300)
def test_a_constrained_output_does_not_depend_on_batch_mates(engine: Engine) -> None:
    schemas = grammar_walks.accepted()
    requests = [
        Request(name, prompt(engine, "JSON please."), sampled(of_schema(schemas[name]), 1.0, max_tokens=40))
        for name in ("flat_object", "weather_tool", "recursive_tree")
    ]
    together = {id: completion.token_ids for id, completion in run(engine, requests).items()}
    alone = {request.id: run(engine, [request])[request.id].token_ids for request in requests}
    assert together == alone


@pytest.mark.timeout(300)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_required_call_is_one_that_validates(engine: Engine, temperature: float) -> None:
    required = grammar(tools=[WEATHER], tool_choice="required")
    request = Request("call", prompt(engine, "The weather in Oslo?"), sampled(required, temperature))
    completion = run(engine, [request])["call"]
    assert completion.finish_reason == "stop"
    call = json.loads(completion.text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call["name"] == "weather"
    grammar_walks.check(json.dumps(call["arguments"]), WEATHER["function"]["parameters"])


@pytest.mark.timeout(300)
def test_tools_that_may_be_called_leave_greedy_text_as_it_is(engine: Engine) -> None:
    prompts = [prompt(engine, text) for text in ("Name three rivers.", "What is a prime number?")]
    requests = [
        Request(f"{kind}{i}", ids, sampled(made, 0.0, max_tokens=60))
        for i, ids in enumerate(prompts)
        for kind, made in (("free", None), ("tools", grammar(tools=[WEATHER])))
    ]
    done = run(engine, requests)
    for i in range(len(prompts)):
        assert done[f"tools{i}"].token_ids == done[f"free{i}"].token_ids


@pytest.mark.timeout(300)
def test_a_length_cut_is_reported_as_such(engine: Engine) -> None:
    made = of_schema(grammar_walks.accepted()["invoice"])
    cut = run(engine, [Request("cut", prompt(engine, "An invoice."), sampled(made, 0.0, max_tokens=5))])[
        "cut"
    ]
    assert cut.finish_reason == "length"
    assert len(cut.token_ids) == 5


@pytest.mark.timeout(300)
def test_a_grammar_that_fails_costs_only_its_request(engine: Engine) -> None:
    good = of_schema(grammar_walks.accepted()["integer_range"])
    requests = [
        Request("good", prompt(engine, "A number."), sampled(good, 0.0)),
        Request("bad", prompt(engine, "A number."), sampled("start: nothing\n", 0.0)),
    ]
    done = run(engine, requests)
    assert done["bad"].finish_reason == "error"
    assert "nothing" in str(done["bad"].error)
    grammar_walks.check(done["good"].text, grammar_walks.accepted()["integer_range"])
