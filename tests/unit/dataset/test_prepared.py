"""What is wrong with steps and rows together is said before anything runs, with what would be right."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs.dataset import prepared, steps
from jobs.dataset.input import input_errors, rows
from tests.unit.dataset import backends

GIVEN = pa.schema([("Star Rating", pa.string()), ("my-text", pa.string()), ("n", pa.int64())])
TWO = {"type": "object", "properties": {"n": {"type": "string"}, "my kind": {"type": "string"}}}


def prepare(*said: dict[str, Any]) -> prepared.Prepared:
    backend = backends.Answering(lambda line: "5")
    made = steps.pipeline(said, "test")
    return prepared.Prepared(made, backend, Path("none"), GIVEN, "parquet", None, str, rows.ignore)


@pytest.mark.parametrize(
    ("prompt", "column"),
    [
        ("{{ Star Rating }}", "Star Rating"),
        ("{{ n }} {{ my-text }}", "my-text"),
        ("{% if my-text %}{% endif %}x", "my-text"),
    ],
)
def test_a_column_whose_name_is_no_word_is_shown_as_a_template_has_it(prompt: str, column: str) -> None:
    with pytest.raises(input_errors.InputError) as caught:
        prepare({"generate": prompt})
    assert f"{{{{ row['{column}'] }}}}" in str(caught.value)
    prepare({"generate": f"{{{{ row['{column}'] }}}}"})


@pytest.mark.parametrize("prompt", ["{{ gone }} and my-text", "{{ gone }} {{ row['my-text'] }}"])
def test_a_column_that_is_not_there_is_named_without_a_hint_at_others(prompt: str) -> None:
    with pytest.raises(input_errors.ColumnMissing, match="no column 'gone'"):
        prepare({"generate": prompt})


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        ({"judge": "Rate {{ output }}"}, r"Write {{ output_n }}"),
        ({"dedupe": "exact"}, r"--on output_n \(in a pipeline, column: output_n\)"),
        ({"filter": {"min_chars": 3}}, "--on output_n"),
        ({"filter": "len(output) > 3"}, "Name those"),
    ],
)
def test_what_looks_for_an_output_that_a_schema_replaced_hears_of_its_columns(
    step: dict[str, Any], advice: str
) -> None:
    with pytest.raises(input_errors.OutputMissing, match=f"has a column: output_n, my kind.*{advice}"):
        prepare({"generate": {"prompt": "x", "schema": TWO}}, step)


def test_an_output_that_no_schema_replaced_is_a_missing_column_like_others() -> None:
    with pytest.raises(input_errors.ColumnMissing, match="no column 'output'"):
        prepare({"generate": {"prompt": "x", "output": "answer"}}, {"dedupe": "exact"})
