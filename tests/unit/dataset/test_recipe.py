"""Recipes: what gives an output another key, and what does not."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.dataset import recipe

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TURNED = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


def made(**changes: Any) -> recipe.Recipe:
    usual = {"model": "m", "fingerprint": "f", "messages": [{"role": "user", "content": "{{ text }}"}]}
    return recipe.Recipe(**usual | changes)


def said(text: str = "hello", role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


# Few values of each, so that equal ones meet as often as different ones.
PARAMETERS = st.builds(
    recipe.Parameters,
    max_tokens=st.sampled_from([None, 1, 2]),
    temperature=st.sampled_from([None, 0, 1]),
    stop=st.sampled_from([(), ("a",), ("a", "b"), ("ab",)]),
)
RECIPES = st.builds(
    made,
    model=st.sampled_from(["m", "n"]),
    fingerprint=st.sampled_from(["f", "g"]),
    parameters=PARAMETERS,
    output_schema=st.sampled_from([None, SCHEMA, TURNED]),
    seed=st.sampled_from([0, 1]),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system"]), "content": st.sampled_from(["", "a", "ab", "ü"])}
    ),
    min_size=1,
    max_size=2,
)
ASKED = st.tuples(RECIPES, MESSAGES, st.integers(0, 2), st.integers(0, 1))


@given(ASKED, ASKED)
def test_keys_are_equal_when_all_that_decides_an_output_is_and_only_then(one: Any, other: Any) -> None:
    def decides(asked: Any) -> bytes:
        return orjson.dumps([asked[0].model_dump_json(), *asked[1:]])

    same = decides(one) == decides(other)
    assert (one[0].key(*one[1:]) == other[0].key(*other[1:])) == same


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n"},
        {"fingerprint": "g"},
        {"seed": 1},
        {"output_schema": SCHEMA},
        {"endpoint": recipe.COMPLETION},
        *({"parameters": {name: 1}} for name in recipe.Parameters.model_fields if name != "stop"),
        {"parameters": {"stop": ["a"]}},
    ],
)
def test_each_thing_alone_that_decides_an_output_changes_its_key(changes: dict[str, Any]) -> None:
    keys = {made().key(said(), 0, 0), made().key(said(), 1, 0), made().key(said(), 0, 1)}
    assert len(keys) == 3
    assert made(**changes).key(said(), 0, 0) not in keys


@given(ASKED)
def test_a_key_outlives_the_process_that_wrote_the_recipe_down(asked: Any) -> None:
    made_by, *rest = asked
    known = recipe.Recipe.model_validate_json(made_by.model_dump_json(indent=2))
    assert known.key(*rest) == made_by.key(*rest)
    made_by.check_same(known, "out")


def test_the_template_alone_changes_no_key_of_a_row_that_renders_to_the_same_prompt() -> None:
    other = made(messages=[{"role": "user", "content": "{{ text }}{# a remark #}"}])
    assert made().key(said(), 0, 0) == other.key(said(), 0, 0)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"model": "n"}, ["-model: m", "+model: n"]),
        ({"fingerprint": "g"}, ["-fingerprint: f", "+fingerprint: g"]),
        ({"seed": 7}, ["-seed: 0", "+seed: 7"]),
        ({"parameters": {"temperature": 0}}, ["+temperature: 0.0"]),
        ({"messages": [{"role": "user", "content": "a {x}\n{{ b }}"}]}, ["+user: a {x}", "+user: {{ b }}"]),
        ({"continues": "talk"}, ["+continues: talk"]),
        ({"output_schema": SCHEMA}, ['+schema:   "type": "object",']),
        ({"endpoint": recipe.COMPLETION}, ["+endpoint: /v1/completions"]),
    ],
)
def test_another_recipe_is_refused_with_what_differs(changes: dict[str, Any], shown: list[str]) -> None:
    with pytest.raises(recipe.RecipeChanged) as caught:
        made(**changes).check_same(made(), "out/")
    lines = str(caught.value).split("\n")
    assert "out/ is of another recipe" in lines[0]
    assert "--overwrite" in lines[0]
    assert set(shown) <= {line.strip() for line in lines}


def test_another_order_of_properties_is_another_recipe_and_shown() -> None:
    with pytest.raises(recipe.RecipeChanged, match=r'[+]schema:     "a"'):
        made(output_schema=TURNED).check_same(made(output_schema=SCHEMA), "out")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"messages": []}, "at least 1"),
        ({"endpoint": recipe.COMPLETION, "messages": said() + said()}, "one prompt"),
        ({"endpoint": recipe.COMPLETION, "continues": "talk"}, "one prompt"),
        ({"endpoint": recipe.COMPLETION, "output_schema": SCHEMA}, "a schema needs a chat"),
        ({"parameters": {"stop": list("abcde")}}, "at most 4"),
        ({"seed": 2**63}, "less than"),
    ],
)
def test_a_recipe_that_no_request_can_be_made_of_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        made(**changes)


def test_a_request_says_all_that_is_set_and_nothing_else() -> None:
    made_by = made(parameters={"max_tokens": 5, "temperature": 0, "stop": ["x"]}, output_schema=SCHEMA)
    key = made_by.key(said(), 0, 0)
    line = orjson.loads(made_by.request(said(), key, 0))
    assert line["custom_id"] == recipe.custom_id(key, 0)
    assert recipe.key_of(line["custom_id"]) == (key, 0)
    assert (line["method"], line["url"]) == ("POST", recipe.CHAT)
    form = line["body"].pop("response_format")
    assert form["json_schema"]["schema"] == SCHEMA
    assert line["body"] == {
        "model": "m",
        "messages": said(),
        "max_tokens": 5,
        "temperature": 0,
        "stop": ["x"],
    }


def test_a_completion_asks_for_the_text_itself() -> None:
    line = orjson.loads(made(endpoint=recipe.COMPLETION).request(said("once"), bytes(16), 0))
    assert line["url"] == recipe.COMPLETION
    assert line["body"]["prompt"] == "once"
    assert "messages" not in line["body"]


def test_each_sample_and_attempt_draws_with_a_seed_of_its_own_that_stays() -> None:
    made_by = made()

    def seed(sample: int, attempt: int) -> int:
        key = made_by.key(said(), sample, 0)
        return orjson.loads(made_by.request(said(), key, attempt))["body"]["seed"]

    seeds = [seed(sample, attempt) for sample in range(3) for attempt in range(3)]
    assert len(set(seeds)) == 9
    assert seeds == [seed(sample, attempt) for sample in range(3) for attempt in range(3)]
    assert all(0 <= each < 2**63 for each in seeds)


def test_a_further_attempt_draws_even_where_the_first_is_greedy() -> None:
    made_by = made(parameters={"temperature": 0})
    first = made_by.request(said(), bytes(16), 0)
    assert "seed" not in orjson.loads(first)["body"]
    again = orjson.loads(made_by.again(orjson.loads(first), 1))
    assert again["body"]["temperature"] > 0
    assert recipe.key_of(again["custom_id"]) == (bytes(16), 1)
    third = orjson.loads(made_by.again(again, 2))
    assert third["body"]["seed"] != again["body"]["seed"]
