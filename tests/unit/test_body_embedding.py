from typing import Any

import pytest

from jobs import bodies, errors
from jobs.bodies import embedding as body_embedding

EMBED = "/v1/embeddings"


def _read(**body: Any) -> body_embedding.EmbeddingBody:
    found = bodies.read(EMBED, {"model": "m", **body})
    assert isinstance(found, body_embedding.EmbeddingBody)
    return found


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("x", ["x"]),
        (["x"], ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_each_form_of_input_is_a_list_of_inputs(given: object, inputs: object) -> None:
    assert _read(input=given).input == inputs


@pytest.mark.parametrize(
    ("given", "at"),
    [
        *[(value, "") for value in ([], 3, {}, True, ["x"] * 2049)],
        *[(value, "[0]") for value in ("", [""], [[]], [None], [{}], [1.5], [True], [-1])],
        *[(value, "[1]") for value in (["x", ""], ["x", 1], ["x", [1]], [[1], "x"], [[1], []], [[1], [-1]])],
        (["x", "y", None], "[2]"),
        ([[1], [True]], "[1]"),
    ],
)
def test_an_input_that_is_none_is_refused_by_its_place(given: object, at: str) -> None:
    with pytest.raises(errors.ParameterRefused) as refused:
        _read(input=given)
    assert refused.value.param == f"input{at}"
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("name", "value"),
    [("encoding_format", value) for value in ("hex", 1, True)]
    + [("dimensions", value) for value in (0, -1, 1.5, "3", True)]
    + [("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("user", 1), ("stream", 0)],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(errors.ParameterRefused) as refused:
        _read(input="x", **{name: value})
    assert refused.value.param == name


def test_each_parameter_that_changes_the_answer_is_kept() -> None:
    assert _read(input="x", user="me").params() == {"encoding": "float"}
    params = _read(input="x", encoding_format="base64", dimensions=8).params()
    assert params == {"encoding": "base64", "dimensions": 8}
    with pytest.raises(errors.ParameterRefused, match="'input'"):
        _read()
